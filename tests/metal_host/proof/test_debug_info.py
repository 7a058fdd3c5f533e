"""Files and lines are read from clang's debug information."""

from metal_host.tracing.intermediate import DebugInfo


def test_files_that_clang_names_relative_to_a_common_folder():
    """Where the repository and the cache lie below one: a header is no part of the kernel."""
    text = """
!1 = !DIFile(filename: "tests/metal_host/runtime/invoke.h", directory: "/common")
!2 = !DIFile(filename: "kernel.metal", directory: "/common/cache")
!3 = distinct !DISubprogram(name: "invoke", scope: !1, file: !1, line: 7)
!4 = distinct !DISubprogram(name: "kernel", scope: !2, file: !2, line: 7)
"""
    info = DebugInfo(text)
    assert info.file("!3") == "/common/tests/metal_host/runtime/invoke.h"
    assert info.file("!4") == "kernel.metal"
