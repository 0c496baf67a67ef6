"""Promise: OpenTelemetry's own SDK gets every number that is logged, and a trace of each step."""

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trainer_parts import batches, parts, same, state, trained

from tritonrec import optional
from tritonrec.distributed import Communicators
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.telemetry import OPEN_STEPS, OpenTelemetryLogger, OpenTelemetryRecorder


@pytest.fixture
def exported(monkeypatch):
    """Spans, by a provider of this test, and a reader of metrics."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
    return spans, reader


def test_a_gauge_has_the_last_value_of_each_name(exported):
    _, reader = exported
    logger = OpenTelemetryLogger({"run": "a"})
    logger.log(1, {"loss": 0.5})
    logger.log(2, {"loss": 0.25, "validation/NDCG@10": 0.1, "lr/0": 1e-3})
    logger.close()
    (about,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {each.name: (each.data.data_points[0].value, dict(each.data.data_points[0].attributes))
             for each in about.metrics}  # fmt: skip
    assert found == {
        "tritonrec.step": (2, {"run": "a"}), "tritonrec.loss": (0.25, {"run": "a"}),
        "tritonrec.validation/ndcg_10": (0.1, {"run": "a"}), "tritonrec.lr/0": (1e-3, {"run": "a"}),
    }  # fmt: skip


def test_a_step_is_a_trace_of_its_stages_and_no_bit_is_another(exported):
    spans, _ = exported
    recorder, made = OpenTelemetryRecorder({"rank": 0}), parts()
    window = WindowConfig(micro_batches=3, seed=4, consistency="batch")
    with Trainer(*made, Communicators.local(), "nestpipe", window, recorder) as training:
        list(training.run(batches(4)))
    recorder.close()
    assert same(state(made), trained(parts(), "nestpipe", "batch", batches(4))[0])
    found = spans.get_finished_spans()
    steps = {span.context.trace_id: span for span in found if span.name == "step"}
    assert sorted(span.attributes["batch"] for span in steps.values()) == [0, 1, 2, 3]
    stages = [span for span in found if span.name != "step"]
    assert {"load", "retrieve", "compute", "write_back"} <= {span.name for span in stages}
    for span in stages:
        step = steps[span.context.trace_id]
        assert span.parent.span_id == step.context.span_id
        assert span.attributes["batch"] == step.attributes["batch"] and step.attributes["rank"] == 0
        assert step.start_time <= span.start_time <= span.end_time <= step.end_time
    computed = [span.attributes["micro_batch"] for span in stages if span.name == "compute"]
    assert sorted(set(computed)) == [0, 1, 2]


def test_a_stage_that_fails_says_so_and_long_runs_keep_few_steps_open(exported):
    spans, _ = exported
    recorder = OpenTelemetryRecorder()
    with pytest.raises(KeyError), recorder.span("compute", "compute", batch=0):
        raise KeyError
    for batch in range(1, OPEN_STEPS + 2):
        with recorder.span("compute", "compute", batch=batch) as about:
            about["keys"] = 3
    found = spans.get_finished_spans()
    assert found[0].attributes["error"] == "KeyError" and found[-1].attributes["keys"] == 3
    assert [span.attributes["batch"] for span in found if span.name == "step"] == [0, 1]


def test_a_step_ends_with_its_last_stage_in_whatever_order_they_come(exported):
    spans, _ = exported
    recorder = OpenTelemetryRecorder()
    for name, start, end in (("exchange", 1000, 5000), ("compute", 1200, 2000)):
        recorder.add("lane", name, start, end, batch=0)
    recorder.close()
    (step,) = (span for span in spans.get_finished_spans() if span.name == "step")
    assert step.end_time - step.start_time == 4000


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    for make in (OpenTelemetryLogger, OpenTelemetryRecorder):
        with pytest.raises(
            ModuleNotFoundError, match=r"opentelemetry-sdk, or pip install 'tritonrec\[telemetry"
        ):
            make()
