# SPDX-License-Identifier: Apache-2.0
"""Workers on a Ray cluster, and the source that collects from them."""
