# SPDX-License-Identifier: Apache-2.0
"""What every program needs around the learning: flags, files, processes, endings, display.

Programs and schemes use this package; it never imports them.
"""

import logging

# Programs report failures themselves; what is logged goes to the run's out.log, where there is one.
logging.getLogger("torchbeast").addHandler(logging.NullHandler())
