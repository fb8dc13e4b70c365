"""The menu of a page holds titles of pages, which are found once for all pages.

Sphinx copies the headings of all pages for the menu of each page, and then drops them. The result here is the same.
"""

import posixpath

from sphinx import addnodes


def titles(env) -> dict:
    """Of each page, its title and the menus under it."""
    found = {}
    for name, headings in env.tocs.items():
        found[name] = headings.deepcopy()
        for item in found[name].children:
            if len(item) > 1:
                menus = list(item[1].findall(addnodes.toctree))
                item[1:] = [item[1]] if menus else []
                if menus:
                    item[1][:] = menus
    return found


def short_menu(app, pagename, templatename, context, doctree) -> None:
    env, whole = app.env, context["toctree"]
    menus = app.__dict__.setdefault("menus", {"titles": titles(env)})
    # files that code.py shows are in no menu, so those of one folder have the same one
    place = pagename if pagename in env.found_docs else posixpath.dirname(pagename) + "/"

    def toctree(**options):
        if (place, *options.items()) not in menus:
            env.tocs, tocs = menus["titles"], env.tocs
            try:
                menus[place, *options.items()] = whole(**options)
            finally:
                env.tocs = tocs
        return menus[place, *options.items()]

    context["toctree"] = toctree


def setup(app):
    app.connect("html-page-context", short_menu, priority=100)  # before the theme's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
