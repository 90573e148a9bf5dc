# SPDX-License-Identifier: Apache-2.0
"""Children of these tests find the tests' environments and models."""

from __future__ import annotations

from children_imports import children_import_from_tests as children_import_from_tests
