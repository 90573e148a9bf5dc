# SPDX-License-Identifier: Apache-2.0
"""Makes the files that protect PolyBeast across machines: an authority, certificates, a token."""
