# SPDX-License-Identifier: Apache-2.0
"""What the tests of CUDA graphs share."""

import torch


def captured(run):
    """run() warmed up on a side stream, as capture asks for, and captured: the graph, and what run() returned, whose
    memory every replay writes again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
