"""Names as formats without JSON write them: the characters that may stand in them."""

import re

NAME = re.compile(r"[^\s<>\[\](){}=,;'\"]+")
IN_TAG = re.compile(r"[^<>\r\n]+")
