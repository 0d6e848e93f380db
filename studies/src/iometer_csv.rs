//! Writes results in the format of Iometer (`iometer.csv`), for existing spreadsheets.
//!
//! Each measured disk (`system`) has one section for each set of access specifications, like a run of Iometer. Columns
//! that do not apply to disks are 0, as in Iometer's files. Columns for CPU and network use, which are not measured, are
//! empty. So are the columns for sectors and queue depth in the rows that sum up workers.

use std::fmt::Write;

use crate::icf::Configuration;
use crate::load::{Direction, Part};

/// The column names of Iometer 1.1.
const COLUMNS: &str = "'Target Type,Target Name,Access Specification Name,# Managers,# Workers,# Disks,IOps,Read IOps,Write IOps,\
    MiBps (Binary),Read MiBps (Binary),Write MiBps (Binary),MBps (Decimal),Read MBps (Decimal),Write MBps (Decimal),\
    Transactions per Second,Connections per Second,Average Response Time,Average Read Response Time,Average Write Response Time,\
    Average Transaction Time,Average Connection Time,Maximum Response Time,Maximum Read Response Time,Maximum Write Response Time,\
    Maximum Transaction Time,Maximum Connection Time,Errors,Read Errors,Write Errors,Bytes Read,Bytes Written,Read I/Os,Write I/Os,\
    Connections,Transactions per Connection,Total Raw Read Response Time,Total Raw Write Response Time,Total Raw Transaction Time,\
    Total Raw Connection Time,Maximum Raw Read Response Time,Maximum Raw Write Response Time,Maximum Raw Transaction Time,\
    Maximum Raw Connection Time,Total Raw Run Time,Starting Sector,Maximum Size,Queue Depth,% CPU Utilization,% User Time,\
    % Privileged Time,% DPC Time,% Interrupt Time,Processor Speed,Interrupts per Second,CPU Effectiveness,Packets/Second,Packet Errors,\
    Segments Retransmitted/Second,0 to 50 uS,50 to 100 uS,100 to 200 uS,200 to 500 uS,0.5 to 1 mS,1 to 2 mS,2 to 5 mS,5 to 10 mS,\
    10 to 15 mS,15 to 20 mS,20 to 30 mS,30 to 50 mS,50 to 100 mS,100 to 200 mS,200 to 500 mS,0.5 to 1 S,1 to 2 s,2 to 4.7 s,4.7 to 5 s,\
    5 to 10 s, >= 10 s";

/// One run: a system, and the specification and result of each worker.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// The system.
    pub system: &'a str,
    /// Names of the specifications, as text for people.
    pub specifications: &'a str,
    /// Each worker.
    pub workers: &'a [Worker],
}

/// A worker and its result in a run.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its name.
    pub name: String,
    /// Name of its specification.
    pub specification: String,
    /// Requests in flight.
    pub depth: usize,
    /// The first sector of the part of the disk that it uses.
    pub first_sector: u64,
    /// The number of sectors of that part.
    pub sectors: u64,
    /// What it measured.
    pub part: Part,
}

/// The text of the file. `written`: the time stamp that Iometer's format contains.
pub fn text(configuration: &Configuration, runs: &[Run<'_>], written: &str) -> String {
    let mut text = format!("'Version\n1.1.0\n'Time Stamp\n{written}\n");
    specifications(&mut text, configuration);
    for run in runs {
        // In Iometer's format, a line that begins with ' is a heading.
        let _ = writeln!(text, "'System\n{}\n'Results\n{COLUMNS}", plain(run.system));
        let mut all = Part::default();
        run.workers.iter().for_each(|worker| all.add(&worker.part));
        let (workers, name) = (run.workers.len().to_string(), plain(run.specifications));
        let summed = Row {
            kind: "ALL",
            name: "All",
            specification: &name,
            counts: ["1", &workers, "1"],
            worker: None,
        };
        summed.write(&mut text, &all);
        let manager = Row { kind: "MANAGER", name: "headwater", counts: ["", &workers, "1"], ..summed };
        manager.write(&mut text, &all);
        for worker in run.workers {
            let (name, specification) = (plain(&worker.name), plain(&worker.specification));
            let (specification, counts) = (specification.as_str(), ["", "", "1"]);
            let row = Row { kind: "WORKER", name: &name, specification, counts, worker: Some(worker) };
            row.write(&mut text, &worker.part);
            let system = plain(run.system);
            Row { kind: "DISK", name: &system, counts: ["", "", ""], ..row }.write(&mut text, &worker.part);
        }
    }
    text
}

/// Replaces commas, because a comma would begin another column.
fn plain(text: &str) -> String {
    text.replace(',', ";")
}

fn specifications(text: &mut String, configuration: &Configuration) {
    text.push_str("'Access specifications\n");
    for specification in &configuration.specifications {
        let _ = writeln!(
            text,
            "'Access specification name,default assignment\n{},0\n'size,% of size,% reads,% random,delay,burst,align,reply",
            plain(&specification.name)
        );
        for line in &specification.lines {
            let _ = writeln!(
                text,
                "{},{},{},{},{},{},{},0",
                line.request_bytes,
                line.share_percent,
                line.read_percent,
                line.random_percent,
                line.delay_ms,
                line.burst,
                line.alignment_bytes
            );
        }
    }
    text.push_str("'End access specifications\n");
}

#[derive(Clone, Copy)]
struct Row<'a> {
    kind: &'a str,
    name: &'a str,
    specification: &'a str,
    /// Numbers of managers, workers and disks.
    counts: [&'a str; 3],
    worker: Option<&'a Worker>,
}

impl Row<'_> {
    fn write(&self, text: &mut String, part: &Part) {
        const MIB: f64 = 1_048_576.0;
        const MB: f64 = 1e6;
        let seconds = part.elapsed_s().max(1e-9);
        let (read, write) = (part.of(Direction::Read), part.of(Direction::Write));
        let [managers, workers, disks] = self.counts;
        let _ =
            write!(text, "{},{},{},{managers},{workers},{disks}", self.kind, self.name, self.specification);
        let mut figures = Vec::new();
        let mut three = |read: f64, write: f64| figures.extend([read + write, read, write]);
        three(read.count as f64 / seconds, write.count as f64 / seconds);
        three(read.bytes as f64 / MIB / seconds, write.bytes as f64 / MIB / seconds);
        three(read.bytes as f64 / MB / seconds, write.bytes as f64 / MB / seconds);
        let mean_ms = |sum_ns: u128, count: u64| sum_ns as f64 / 1e6 / count.max(1) as f64;
        let ms = |ns: u64| ns as f64 / 1e6;
        figures.extend([
            0.0,
            0.0,
            mean_ms(read.sum_ns + write.sum_ns, read.count + write.count),
            mean_ms(read.sum_ns, read.count),
            mean_ms(write.sum_ns, write.count),
            0.0,
            0.0,
            ms(read.max_ns.max(write.max_ns)),
            ms(read.max_ns),
            ms(write.max_ns),
            0.0,
            0.0,
        ]);
        figures.iter().for_each(|figure| {
            let _ = write!(text, ",{figure:.6}");
        });
        // Three columns of errors, which are 0 because an error ends a study; two of bytes, two of requests, connections, and
        // transactions per connection.
        let _ = write!(text, ",0,0,0,{},{},{},{},0,0", read.bytes, write.bytes, read.count, write.count);
        // Raw times in nanoseconds, and the time of the run.
        let run_ns = (seconds * 1e9) as u64;
        let raw =
            [read.sum_ns, write.sum_ns, 0, 0, read.max_ns.into(), write.max_ns.into(), 0, 0, run_ns.into()];
        raw.iter().for_each(|ns| {
            let _ = write!(text, ",{ns}");
        });
        match self.worker {
            Some(worker) => {
                let _ = write!(text, ",{},{},{}", worker.first_sector, worker.sectors, worker.depth);
            }
            None => text.push_str(",,,"),
        }
        // CPU and network use are not measured.
        text.push_str(",,,,,,,,,,,");
        part.bins().iter().for_each(|count| {
            let _ = write!(text, ",{count}");
        });
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::icf::TWO_WORKERS;

    #[test]
    fn each_row_has_a_field_for_each_column() {
        let configuration = Configuration::parse(TWO_WORKERS).unwrap();
        let mut part = Part::default();
        for (direction, us) in [(Direction::Read, 40), (Direction::Write, 3000), (Direction::Write, 5000)] {
            part.count_one(direction, 4096, Duration::from_micros(us));
        }
        part.set_elapsed(Duration::from_secs(2));
        let worker = Worker {
            name: "Worker 1".into(),
            specification: "VDI, 4K".into(),
            depth: 16,
            first_sector: 8,
            sectors: 2048,
            part,
        };
        let run = Run { system: "raw disk", specifications: "VDI, 4K", workers: &[worker] };
        let text = text(&configuration, &[run], "2026-11-29");
        let rows: Vec<Vec<&str>> = text
            .lines()
            .skip_while(|line| !line.starts_with("'Target Type"))
            .map(|line| line.split(',').collect())
            .collect();
        assert_eq!(rows[0].len(), 80);
        let kinds: Vec<&str> = rows[1..].iter().map(|row| row[0]).collect();
        assert_eq!(kinds, ["ALL", "MANAGER", "WORKER", "DISK"]);
        for row in &rows[1..] {
            assert_eq!(row.len(), 80, "{row:?}");
            let column = |name: &str| row[rows[0].iter().position(|found| *found == name).unwrap()];
            assert_eq!(row[2], "VDI; 4K");
            assert_eq!((column("IOps"), column("Write IOps")), ("1.500000", "1.000000"));
            assert_eq!((column("Read I/Os"), column("Bytes Written")), ("1", "8192"));
            assert_eq!(
                (column("Average Write Response Time"), column("Maximum Response Time")),
                ("4.000000", "5.000000")
            );
            assert_eq!((column("0 to 50 uS"), column("2 to 5 mS"), column("5 to 10 mS")), ("1", "1", "1"));
        }
        assert_eq!(rows[3][45..48], ["8", "2048", "16"]);
    }
}
