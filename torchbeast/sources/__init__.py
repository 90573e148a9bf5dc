# SPDX-License-Identifier: Apache-2.0
"""Where batches of rollouts come from."""
