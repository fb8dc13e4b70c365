"""The secret key, the named streams derived from it, and the noise that a stream draws.

`streams.py` holds the cipher and derives keys with it; `noise.py` is the noisy release of every mechanism, rounded to a
grid; `normals.py` turns blocks of the cipher into normals.
"""

from dpx.keys.noise import normals_of_release as normals_of_release
from dpx.keys.noise import release as release
from dpx.keys.noise import release_and_noise as release_and_noise
from dpx.keys.streams import SMALL as SMALL
from dpx.keys.streams import fold_in as fold_in
from dpx.keys.streams import has_small_seed as has_small_seed
from dpx.keys.streams import is_key as is_key
from dpx.keys.streams import key_words as key_words
from dpx.keys.streams import mark_of_key as mark_of_key
from dpx.keys.streams import public_key as public_key
from dpx.keys.streams import require_key as require_key
from dpx.keys.streams import secret_key as secret_key
from dpx.keys.streams import stream as stream
from dpx.keys.streams import warn_if_guessable as warn_if_guessable
