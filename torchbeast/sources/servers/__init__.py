# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's source: environment servers, reached over gRPC."""
