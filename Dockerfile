# SPDX-License-Identifier: Apache-2.0
#
#   docker build -t torchbeast . && docker run torchbeast            trains PolyBeast on Pong
#   docker run torchbeast --env CartPole-v1 --total_steps 500000     another environment
#   docker build --target test .                                     runs all tests
#   docker build --build-arg PIP_EXTRA_INDEX_URL= -t torchbeast .    with the CUDA build of torch
#
# `build` compiles a wheel with gRPC inside, `test` runs the tests, and the final image holds Python,
# torch and the wheel, but no compiler.
FROM debian:bookworm-slim AS build
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends make ca-certificates
WORKDIR /torchbeast
COPY . .
RUN make wheel

FROM build AS test
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN make test

FROM debian:bookworm-slim
RUN apt-get update -qq \
  && apt-get install -y -qq --no-install-recommends ca-certificates python3-venv \
  && rm -rf /var/lib/apt/lists/* \
  && useradd --create-home torchbeast \
  && python3 -m venv /opt/torchbeast
# pip takes the CPU build of torch from here: 2.13.0+cpu counts as newer than 2.13.0.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY --from=build /torchbeast/dist/*.whl /torchbeast/constraints.txt /tmp/
RUN /opt/torchbeast/bin/pip install -q --no-cache-dir -c /tmp/constraints.txt \
  "$(echo /tmp/torchbeast-*.whl)[metrics,plot,tensorboard,tls,video]" && rm /tmp/*.whl
# For runs that outlive their container: a new volume that is mounted here gets the folder's owner.
RUN install -d -o torchbeast -g torchbeast /runs
USER torchbeast
WORKDIR /home/torchbeast
# --init is not needed: the program ends its own children and handles SIGTERM.
ENTRYPOINT ["/opt/torchbeast/bin/python", "-m", "torchbeast.polybeast"]
CMD ["--preset", "pong"]
