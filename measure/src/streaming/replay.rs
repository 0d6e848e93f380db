//! Replays a boot's reads over a slow link, with the trace of an earlier boot and without.
//!
//! In the recorded boot, nearly every request is sent after the answer to the request before. The replay does the same,
//! but without a pause in between. The clock runs from the start of the program that serves the disk to the last
//! answer, so it includes opening the image and fetching its list of chunks.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use headwater_block::{Device, blocking};

use super::boot_log::{self, Read};
use super::line::{FAR, Line};
use super::over_nbd::{self, Nbdkit};
use super::server::{Export, Exported, Offer, Tls};
use super::stores::Made;
use super::{Comparison, Rounds, mib, need_guest};
use crate::Plan;
use crate::iscsi::free_port;
use crate::targets::Goal;

/// Delays of the line in each direction: the first is judged by the goal, the second is half of it.
const DELAYS_MS: [(u64, &str); 2] = [(2, "seconds"), (1, "seconds at 1 ms each way")];

/// The ways in which the reads are served: name, options.
const WAYS: [(&str, &[&str]); 3] = [
    ("by boot trace", &[]),
    ("on demand", &["--boot-trace", "off", "--readahead", "off"]),
    ("on demand, with readahead", &["--boot-trace", "off"]),
];

/// The results of one way.
struct Replayed {
    seconds: f64,
    store_bytes: u64,
    received_bytes: u64,
}

/// Measures all ways, and the time of a plain transfer over the line.
pub fn run(plan: &Plan) -> Result<Vec<Comparison>> {
    need_guest(plan)?;
    let mut line = Line::start()?;
    let reads = boot_log::record(plan)?;
    println!("  {} requests, {:.1} MiB", reads.len(), mib(reads.iter().map(|read| read.len as u64).sum()));
    let made = Made::import(plan, "slow-link", &plan.image, "guest")?;
    record_trace(plan, &made, &reads)?;
    let tls = Tls::make(&plan.sockets, &[FAR])?;
    let offer = Offer::start(line.far(&plan.headwater), &made.store(), free_port()?, &tls)?;
    let mut rounds = Rounds::new();
    let nbdkit = Nbdkit::start(&line, &plan.image)?;
    for (delay_ms, figure) in DELAYS_MS {
        let over_nbd = line.relay(nbdkit.port(), delay_ms)?;
        let from = format!("https://{FAR}:{}", line.relay(offer.port(), delay_ms)?);
        let ca = tls.authority.display().to_string();
        for round in 0..plan.rounds {
            let mut all = Vec::new();
            for (name, options) in WAYS {
                let more = [&["--ca", ca.as_str()], options].concat();
                let what = Exported { image: "guest", from: &from, nbd: None, more: &more };
                let replayed = replay(plan, line.near(&plan.headwater), &what, &reads)
                    .with_context(|| format!("reading {name}"))?;
                println!(
                    "  round {}/{}, {delay_ms} ms each way  {name:<26}{:>7.3} s{:>7.1} MiB received",
                    round + 1,
                    plan.rounds,
                    replayed.seconds,
                    mib(replayed.received_bytes)
                );
                all.push(replayed);
            }
            let [trace, demand, readahead] = &all[..] else { bail!("there are three ways") };
            let peer = over_nbd::seconds(&line, over_nbd, &reads)?;
            println!(
                "  round {}/{}, {delay_ms} ms each way  {:<26}{peer:>7.3} s",
                round + 1,
                plan.rounds,
                over_nbd::PEER
            );
            // Without readahead, only the chunks that the boot needs are fetched.
            let needed = demand.store_bytes;
            let url = format!("{from}/{}", made.largest_object()?.display());
            let bare = bare_line(&line, &url, &ca, needed)?;
            println!(
                "  round {}/{}, {delay_ms} ms each way  {:<26}{bare:>7.3} s{:>7.1} MiB",
                round + 1,
                plan.rounds,
                "plain transfer",
                mib(needed)
            );
            let is_case = delay_ms == DELAYS_MS[0].0;
            let goal = |goal| if is_case { goal } else { Goal::None };
            let like = |figure, ours, peer: &str, theirs, goal| Comparison {
                case: "slow-link",
                figure,
                ours: vec![ours],
                peer: peer.into(),
                theirs: vec![theirs],
                goal,
            };
            rounds.add(like(figure, trace.seconds, WAYS[1].0, demand.seconds, goal(Goal::AtMost(1.0 / 3.0))));
            rounds.add(like(figure, trace.seconds, over_nbd::PEER, peer, goal(Goal::AtMost(1.0 / 3.0))));
            rounds.add(like(figure, trace.seconds, WAYS[2].0, readahead.seconds, Goal::None));
            rounds.add(like(figure, trace.seconds, "plain transfer", bare, goal(Goal::AtMost(1.15))));
            if is_case {
                let (ours, theirs) = (mib(trace.received_bytes), mib(needed));
                rounds.add(like("MiB received", ours, "needed by the boot", theirs, Goal::AtMost(1.2)));
            }
        }
    }
    Ok(rounds.0)
}

/// Records a trace of these reads, like a boot on the host of the store.
fn record_trace(plan: &Plan, made: &Made, reads: &[Read]) -> Result<()> {
    let from = made.store().display().to_string();
    let what = Exported { image: "guest", from: &from, nbd: None, more: &[] };
    replay(plan, Command::new(&plan.headwater), &what, reads)?;
    let traces = made.store().join("traces");
    let kept = std::fs::read_dir(&traces).map_or(0, Iterator::count);
    if kept != 1 {
        bail!(
            "the replayed boot must leave one boot trace in {}, but there are {kept} files: see the log of headwater",
            traces.display()
        );
    }
    Ok(())
}

/// Serves the image, and sends the recorded reads one after another.
fn replay(plan: &Plan, command: Command, what: &Exported<'_>, reads: &[Read]) -> Result<Replayed> {
    let start = Instant::now();
    let export = Export::start(plan, command, what)?;
    let disk = export.connect()?;
    let size_bytes = disk.geometry().size_bytes;
    let mut buffer = Vec::new();
    for read in reads {
        if read.offset.saturating_add(read.len as u64) > size_bytes {
            bail!("the boot read at {}, past the end of the image", read.offset);
        }
        buffer.resize(read.len, 0);
        blocking::read(&*disk, read.offset, &mut buffer)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let counters = export.counters()?;
    Ok(Replayed {
        seconds,
        store_bytes: counters.get("store_bytes")?,
        received_bytes: counters.get("received_bytes")?,
    })
}

/// Seconds from a request to the last byte of an answer with this many bytes, over the line.
fn bare_line(line: &Line, url: &str, authority: &str, bytes: u64) -> Result<f64> {
    let mut curl = line.near("curl".as_ref());
    curl.args([
        "--silent",
        "--show-error",
        "--fail",
        "--noproxy",
        "*",
        "--cacert",
        authority,
        "--output",
        "/dev/null",
    ]);
    curl.args(["--range", &format!("0-{}", bytes.saturating_sub(1))]);
    curl.args(["--write-out", "%{time_pretransfer} %{time_total} %{size_download}", url]);
    let output = curl.output().context("cannot run curl; apt-get install curl")?;
    if !output.status.success() {
        bail!("curl failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [before, total, size] = numbers[..] else { bail!("curl said '{text}'") };
    if (size / 1_048_576.0 - mib(bytes)).abs() > 0.01 {
        bail!("the server sent {size} bytes, not {bytes}");
    }
    Ok(total - before)
}
