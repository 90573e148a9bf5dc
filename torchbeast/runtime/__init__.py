# SPDX-License-Identifier: Apache-2.0
"""What every program needs around the learning: flags, files, processes, endings, display.

Programs and schemes use this package; it never imports them.
"""
