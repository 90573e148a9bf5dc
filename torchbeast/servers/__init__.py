# SPDX-License-Identifier: Apache-2.0
"""Environment servers, and the source that plays on them over gRPC."""
