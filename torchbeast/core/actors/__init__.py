# SPDX-License-Identifier: Apache-2.0
"""Networks: what sees observations and gives a policy and a value."""
