//! What a benchmark found: printed for people, written as JSON, judged against its bars.
//!
//! The first verdict is the benchmark's own; its line is the last one printed. All of them must be met.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::lab::{Lab, Result, Tier};
use crate::measure::{Run, Spread};
use crate::process;

/// What was measured several times. Without runs there is a reason.
#[derive(Debug)]
struct Figure {
    name: String,
    unit: &'static str,
    runs: Vec<f64>,
    absent: Option<String>,
}

/// On which side of a number a verdict must lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// Told, not judged.
    None,
}

#[derive(Debug)]
struct Verdict {
    /// One for each pair of runs, or one for all.
    values: Vec<f64>,
    /// `what / limit`.
    of: String,
    bar: Bar,
}

impl Verdict {
    fn value(&self) -> f64 {
        Spread::of(&self.values).map_or(f64::NAN, |spread| spread.median)
    }

    /// What could not be measured is not met.
    fn is_met(&self) -> bool {
        match self.bar {
            Bar::AtLeast(least) => self.value() >= least,
            Bar::AtMost(most) => self.value() <= most,
            Bar::None => true,
        }
    }

    fn judged(&self) -> String {
        let met = if self.is_met() { "met" } else { "MISSED" };
        match self.bar {
            Bar::AtLeast(least) => format!("at least {least}: {met}"),
            Bar::AtMost(most) => format!("at most {most}: {met}"),
            Bar::None => "no bar".to_owned(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Report {
    bench: &'static str,
    figures: Vec<Figure>,
    verdicts: Vec<Verdict>,
    notes: Vec<String>,
}

impl Report {
    pub(crate) fn new(bench: &'static str) -> Self {
        Self { bench, figures: Vec::new(), verdicts: Vec::new(), notes: Vec::new() }
    }

    pub(crate) fn figure(&mut self, name: impl Into<String>, unit: &'static str, runs: Vec<f64>) {
        let absent = runs.is_empty().then(|| "not measured".to_owned());
        self.figures.push(Figure { name: name.into(), unit, runs, absent });
    }

    pub(crate) fn absent(&mut self, name: impl Into<String>, unit: &'static str, why: impl Into<String>) {
        self.figures.push(Figure { name: name.into(), unit, runs: Vec::new(), absent: Some(why.into()) });
    }

    pub(crate) fn verdict(&mut self, values: Vec<f64>, of: impl Into<String>, bar: Bar) {
        self.verdicts.push(Verdict { values, of: of.into(), bar });
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// CPU seconds a million of something, of whatever could be seen.
    pub(crate) fn per_million(&mut self, name: String, seconds: Vec<Option<f64>>, millions: f64, why: &str) {
        const UNIT: &str = "CPU s per million";
        match seconds.into_iter().map(|cpu| Some(cpu? / millions)).collect::<Option<Vec<f64>>>() {
            Some(runs) => self.figure(name, UNIT, runs),
            None => self.absent(name, UNIT, why),
        }
    }

    /// Rate, CPU and memory of runs that published so many messages each.
    pub(crate) fn runs(&mut self, lab: &Lab, name: &str, messages: f64, runs: &[Run]) {
        let why = lab.servers.unseen.join("; ");
        let millions = messages / 1e6;
        self.figure(name, "messages/s", runs.iter().map(|run| run.rate).collect());
        let cpu = |of: fn(&Run) -> Option<f64>| runs.iter().map(of).collect();
        self.per_million(format!("{name}: its process"), cpu(|run| Some(run.cpu)), millions, &why);
        self.per_million(format!("{name}: Postgres"), cpu(|run| run.postgres_cpu), millions, &why);
        self.per_million(format!("{name}: broker"), cpu(|run| run.broker_cpu), millions, &why);
        self.figure(format!("{name}: resident"), "MiB", runs.iter().map(|run| run.peak / MIB).collect());
    }

    pub(crate) fn is_met(&self) -> bool {
        self.verdicts.iter().all(Verdict::is_met)
    }

    pub(crate) fn print(&self) {
        for figure in &self.figures {
            match (Spread::of(&figure.runs), &figure.absent) {
                (Some(Spread { median, min, max }), _) => println!(
                    "  {:<44} median {:>10}  min {:>10}  max {:>10}  {}",
                    figure.name,
                    number(median),
                    number(min),
                    number(max),
                    figure.unit
                ),
                (None, why) => {
                    println!("  {:<44} n/a ({})", figure.name, why.as_deref().unwrap_or("not measured"));
                }
            }
        }
        for note in &self.notes {
            println!("  {note}");
        }
        for verdict in self.verdicts.iter().rev() {
            if let Some(Spread { median, min, max }) =
                Spread::of(&verdict.values).filter(|_| verdict.values.len() > 1)
            {
                println!(
                    "  {}: median {median:.3}, min {min:.3}, max {max:.3} of {}",
                    verdict.of,
                    verdict.values.len()
                );
            }
            let ratio = Some(verdict.value()).filter(|value| value.is_finite());
            let ratio = ratio.map_or_else(|| "n/a".to_owned(), |ratio| format!("{ratio:.2}"));
            println!("  {}: {ratio}, {}", verdict.of, verdict.judged());
        }
        if let Some(verdict) = self.verdicts.first() {
            println!("bench {}: ratio {:.2} ({})", self.bench, verdict.value(), verdict.of);
        }
    }

    /// Writes it to `bench/results` if it was a full run, else beside the programs, and says where.
    pub(crate) fn save(&self, lab: &Lab) -> Result<PathBuf> {
        let folder = match lab.tier {
            Tier::Full => Path::new(env!("CARGO_MANIFEST_DIR")).join("results"),
            Tier::Quick => process::scratch(lab)?,
        };
        std::fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{}.json", self.bench));
        std::fs::write(&path, format!("{:#}\n", self.json(lab)))?;
        Ok(path)
    }

    fn json(&self, lab: &Lab) -> Value {
        let figures = self.figures.iter().map(|figure| {
            let mut value = match Spread::of(&figure.runs) {
                Some(Spread { median, min, max }) => {
                    json!({"unit": figure.unit, "median": round(median), "min": round(min), "max": round(max),
                           "runs": figure.runs.iter().copied().map(round).collect::<Vec<_>>()})
                }
                None => json!({"unit": figure.unit, "median": null}),
            };
            if let (Some(absent), Some(value)) = (&figure.absent, value.as_object_mut()) {
                value.insert("absent".to_owned(), json!(absent));
            }
            (figure.name.clone(), value)
        });
        let verdicts = self.verdicts.iter().map(|verdict| {
            let (side, bar) = match verdict.bar {
                Bar::AtLeast(bar) => ("at_least", Some(bar)),
                Bar::AtMost(bar) => ("at_most", Some(bar)),
                Bar::None => ("bar", None),
            };
            let values: Vec<Value> = verdict.values.iter().copied().map(round).collect();
            json!({"of": verdict.of, "ratio": round(verdict.value()), "pairs": values, side: bar, "met": verdict.is_met()})
        });
        json!({
            "bench": self.bench,
            "tier": match lab.tier { Tier::Full => "full", Tier::Quick => "quick" },
            "date": lab.date,
            "commit": commit(),
            "machine": machine(lab),
            "settings": process::given_settings().into_iter().map(|(k, v)| (k, json!(v))).collect::<Map<_, _>>(),
            "verdicts": verdicts.collect::<Vec<_>>(),
            "figures": figures.collect::<Map<_, _>>(),
            "notes": self.notes,
        })
    }
}

pub(crate) const MIB: f64 = 1_048_576.0;

fn number(value: f64) -> String {
    match value.abs() {
        0.0..10.0 => format!("{value:.3}"),
        10.0..1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Four significant digits are more than a benchmark knows.
fn round(value: f64) -> Value {
    let decimals = if value.abs() < 10.0 { 4 } else { 1 };
    format!("{value:.decimals$}").parse::<f64>().map_or(Value::Null, |value| json!(value))
}

/// Which sources this was built from, as far as git knows: results themselves do not make a tree dirty.
fn commit() -> Value {
    let git = |args: &[&str]| {
        let output = Command::new("git").current_dir(env!("CARGO_MANIFEST_DIR")).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let dirty = git(&["status", "--porcelain", "--", ":/", ":!results"]).map(|changes| !changes.is_empty());
    json!({"id": git(&["rev-parse", "HEAD"]), "dirty": dirty})
}

fn machine(lab: &Lab) -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    json!({
        "cpu": field(&read("/proc/cpuinfo"), "model name"),
        "cores": std::thread::available_parallelism().map(usize::from).ok(),
        "memory": field(&read("/proc/meminfo"), "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "postgres": lab.postgres,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(values: &[f64], bar: Bar) -> Verdict {
        Verdict { values: values.to_vec(), of: "a / b".to_owned(), bar }
    }

    #[test]
    fn a_verdict_is_the_median_on_its_side_of_the_bar() {
        assert!(verdict(&[0.5, 0.8, 0.9], Bar::AtLeast(0.75)).is_met());
        assert!(!verdict(&[0.5, 0.7, 0.9], Bar::AtLeast(0.75)).is_met());
        assert!(verdict(&[1.1], Bar::AtMost(1.1)).is_met());
        assert!(!verdict(&[1.2], Bar::AtMost(1.1)).is_met());
    }

    #[test]
    fn what_was_not_measured_meets_no_bar() {
        assert!(!verdict(&[], Bar::AtLeast(0.0)).is_met());
        assert!(!verdict(&[f64::NAN], Bar::AtMost(9.0)).is_met());
        assert!(verdict(&[], Bar::None).is_met());
    }

    #[test]
    fn one_missed_bar_is_enough() {
        let mut report = Report::new("b");
        report.verdict(vec![1.0], "a / b", Bar::AtLeast(0.75));
        assert!(report.is_met());
        report.verdict(vec![2.0], "c / d", Bar::AtMost(1.0));
        assert!(!report.is_met());
    }
}
