from pathlib import Path

import torch
from stage_files import F32, Q8_0, TensorFile

from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.ngram_rows import FileNgramTable


def test_rows_come_from_the_file_one_by_one_and_equal_ids_once(tmp_path: Path) -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    for ggml_type, row_bytes in ((F32, 256), (Q8_0, 68)):
        file = TensorFile(tmp_path / "table.bin", {"other": (values, F32), "table": (values, ggml_type)})
        counters = TransferCounters()
        reader = file.reader(counters)
        table = FileNgramTable(file.extents["table"], reader)
        assert counters.snapshot().file_read == 0
        ids = torch.tensor([49, 0, 7, 7, 49, 7])
        assert torch.equal(table.rows(ids), file.values["table"][ids])
        assert counters.snapshot().file_read == 3 * row_bytes
        reader.close()
