"""The kinds of tasks that `examples.loop` trains, by name.

To add one: a module with a `KIND`, and a line in `TASKS`.
"""

from examples.tasks import images, language, text, users
from examples.tasks.task import Kind, Task

__all__ = ["TASKS", "Kind", "Task"]

TASKS: dict[str, Kind] = {
    "images": images.KIND,
    "text": text.KIND,
    "language": language.KIND,
    "users": users.KIND,
}
