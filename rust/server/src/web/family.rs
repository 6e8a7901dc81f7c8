//! Metrics as data, and their text in both formats of Prometheus.

use super::names::Kind;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::fmt;

/// Text format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Prometheus,
    OpenMetrics,
}

impl Form {
    /// The form that an `Accept` header asks for.
    pub(super) fn wanted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Whole(u64),
    Real(f64),
    /// Upper bounds, and the number of observations in each bucket.
    Histogram {
        sum: f64,
        count: u64,
        buckets: Vec<(f64, u64)>,
    },
}

pub(super) type Labels = Vec<(&'static str, String)>;

/// A metric with its series.
#[derive(Debug)]
pub(super) struct Family {
    /// Without the prefix `fastps_`, unless it begins with `process_`, as in every program.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) help: &'static str,
    pub(super) series: Vec<(Labels, Value)>,
}

/// The text of these metrics.
pub(super) fn encode(families: Vec<Family>, form: Form) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Families(families)));
    let mut out = String::new();
    match form {
        Form::Prometheus => prometheus_text::encode(&mut out, &registry)?,
        Form::OpenMetrics => text::encode(&mut out, &registry)?,
    }
    Ok(out)
}

#[derive(Debug)]
struct Families(Vec<Family>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Family { name, kind, help, series } in &self.0 {
            let of_kind = match kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            // The registry adds the full stop that the format asks for to its own metrics only.
            let help = format!("{help}.");
            let prefix = if name.starts_with("process_") { "" } else { "fastps_" };
            let name = format!("{prefix}{name}");
            let mut metric = encoder.encode_descriptor(&name, &help, None, of_kind)?;
            for (labels, value) in series {
                let mut point = metric.encode_family(labels)?;
                match (kind, value) {
                    (_, Value::Histogram { sum, count, buckets }) => {
                        point.encode_histogram::<Labels>(*sum, *count, buckets, None)?;
                    }
                    (Kind::Counter, Value::Whole(value)) => {
                        point.encode_counter::<Labels, _, u64>(value, None)?;
                    }
                    (Kind::Counter, Value::Real(value)) => {
                        point.encode_counter::<Labels, _, u64>(value, None)?;
                    }
                    (_, Value::Whole(value)) => point.encode_gauge(value)?,
                    (_, Value::Real(value)) => point.encode_gauge(value)?,
                }
            }
        }
        Ok(())
    }
}
