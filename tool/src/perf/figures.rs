//! What a benchmark has found, as JSON and as a table. `rpcrdma perf` and bench/bench.sh write the same format, and pictures
//! are drawn from it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::numbers::{bytes, grouped};

/// The whole document.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// What was measured, where and when.
    pub title: String,
    /// How it was measured.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The ways that calls went; the first is the one that the others are compared with.
    pub ways: Vec<Way>,
    pub rows: Vec<Row>,
    /// It was ended before its time: some rows have fewer rounds, or are not there.
    #[serde(default)]
    pub interrupted: bool,
    /// All calls over rdma, by the benchmark's own count and by the counters of the libraries at both ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub totals: Option<Totals>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Way {
    /// The key of its figures in each row.
    pub name: String,
    /// What the way is, in words.
    pub what: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Row {
    pub call: String,
    pub bytes: u64,
    pub threads: u32,
    pub ways: BTreeMap<String, Measured>,
}

/// Medians of the rounds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    #[serde(default)]
    pub rounds: u32,
    /// In all rounds.
    #[serde(default)]
    pub calls: u64,
    pub calls_per_second: f64,
    #[serde(default)]
    pub megabytes_per_second: f64,
    /// Microseconds of a call.
    pub latency_us: Latency,
    /// Microseconds of processor time of both ends for a call.
    pub cpu_us: f64,
}

/// The time that so many of a hundred calls took at most; p999: of a thousand.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    pub p10: Option<f64>,
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub p999: Option<f64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Totals {
    pub calls: u64,
    pub client: BTreeMap<String, u64>,
    pub server: BTreeMap<String, u64>,
}

impl Row {
    /// The row in words.
    pub fn label(&self) -> String {
        let threads = if self.threads == 1 { "1 thread".into() } else { format!("{} threads", self.threads) };
        match self.bytes {
            0 => format!("{}, {threads}", self.call),
            n => format!("{} {}, {threads}", self.call, bytes(n)),
        }
    }

    /// Calls a second relative to the first way.
    pub fn ratio(&self, first: &str, way: &str) -> Option<f64> {
        let (base, other) = (self.ways.get(first)?, self.ways.get(way)?);
        let ratio = other.calls_per_second / base.calls_per_second;
        (ratio.is_finite() && ratio > 0.0).then_some(ratio)
    }
}

impl Figures {
    /// The table for people.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n", self.title);
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        for way in &self.ways {
            let _ = writeln!(text, "{}: {}", way.name, way.what);
        }
        let _ = writeln!(
            text,
            "\n{:<6} {:>8} {:>7}  {:<5} {:>10} {:>6} {:>9} {:>9} {:>8} {:>9}",
            "call", "bytes", "threads", "over", "calls/s", "ratio", "p50 us", "p99 us", "MB/s", "CPU us"
        );
        let first = self.ways.first().map_or("", |way| &way.name);
        for row in &self.rows {
            let mut name = format!("{:<6} {:>8} {:>7}", row.call, bytes(row.bytes), row.threads);
            for way in &self.ways {
                let Some(found) = row.ways.get(&way.name) else { continue };
                let ratio = match row.ratio(first, &way.name) {
                    Some(ratio) if way.name != first => format!("{ratio:.2}"),
                    _ => String::new(),
                };
                let rate = if row.bytes == 0 { String::new() } else { figure(found.megabytes_per_second) };
                let _ = writeln!(
                    text,
                    "{name:<23}  {:<5} {:>10} {:>6} {:>9} {:>9} {:>8} {:>9}",
                    way.name,
                    figure(found.calls_per_second),
                    ratio,
                    found.latency_us.p50.map_or_else(String::new, figure),
                    found.latency_us.p99.map_or_else(String::new, figure),
                    rate,
                    figure(found.cpu_us)
                );
                name.clear();
            }
        }
        text.push_str(
            "\nratio: rdma to tcp, calls a second; p50, p99: of a call's time;\nCPU: processor time of both ends for a call\n",
        );
        if self.interrupted {
            text.push_str("Ended before its time: these are the rounds that were complete.\n");
        }
        text
    }
}

/// Three digits, or as many as it has before the point.
fn figure(value: f64) -> String {
    match value {
        v if v >= 99.95 => grouped(v.round() as u64),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let measured = |rate: f64| Measured { calls_per_second: rate, ..Measured::default() };
        let figures = Figures {
            title: "t".into(),
            ways: vec![
                Way { name: "tcp".into(), what: "stock".into() },
                Way { name: "rdma".into(), what: "ours".into() },
            ],
            rows: vec![Row {
                call: "write".into(),
                bytes: 65536,
                threads: 4,
                ways: [("tcp".to_owned(), measured(1000.0)), ("rdma".to_owned(), measured(2500.0))].into(),
            }],
            ..Figures::default()
        };
        let text = serde_json::to_string(&figures).unwrap();
        let again: Figures = serde_json::from_str(&text).unwrap();
        assert_eq!(again.rows[0].ratio("tcp", "rdma"), Some(2.5));
        assert_eq!(again.rows[0].label(), "write 64K, 4 threads");
        assert!(again.table().contains("2.50"), "{}", again.table());
    }

    #[test]
    fn a_row_that_one_way_lacks_or_that_stood_still_has_no_ratio() {
        let mut row = Row::default();
        assert_eq!(row.ratio("tcp", "rdma"), None);
        row.ways.insert("tcp".into(), Measured::default());
        row.ways.insert("rdma".into(), Measured::default());
        assert_eq!(row.ratio("tcp", "rdma"), None);
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!(
            [0.1234, 9.994, 12.345, 99.96, 123456.7].map(figure),
            ["0.12", "9.99", "12.3", "100", "123,457"]
        );
    }
}
