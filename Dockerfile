# SPDX-License-Identifier: Apache-2.0
#
#   docker build -t torchbeast . && docker run torchbeast            trains PolyBeast on Pong
#   docker run torchbeast --env CartPole-v1 --total_steps 500000     another environment
#   docker build --target test -t torchbeast-test .                  runs all tests
FROM debian:bookworm-slim AS build
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends make ca-certificates
WORKDIR /torchbeast
COPY . .
RUN make install

FROM build AS test
RUN make test

FROM build AS train
# --init is not needed: the program ends its own children and heeds SIGTERM.
ENTRYPOINT ["/torchbeast/.venv/bin/python", "-m", "torchbeast.polybeast"]
CMD ["--preset", "pong"]
