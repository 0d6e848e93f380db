//! Measures many readers of one image: how much the store must read, and the CPU time compared with servers of a
//! plain file.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::server::{Export, Exported};
use super::stores::{Made, make_disk};
use super::{Comparison, Rounds, mib};
use crate::fio::{self, Reading};
use crate::iscsi::{free_port, wait_for_port};
use crate::systems::Process;
use crate::targets::Goal;
use crate::{Plan, process};

const COLD_READERS: u32 = 32;
const WARM_READERS: u32 = 16;

/// Many readers start at the same time with an empty chunk cache.
pub fn cold(plan: &Plan) -> Result<Vec<Comparison>> {
    let bytes: u64 = if plan.quick { 64 << 20 } else { 300_000_000 / 65_536 * 65_536 };
    let raw = plan.work_dir.join("storm.raw");
    make_disk(&raw, bytes, 1)?;
    let made = Made::import(plan, "storm-cold", &raw, "storm")?;
    std::fs::remove_file(&raw)?;
    let distinct = made.objects_bytes()?;
    let from = made.store().display().to_string();
    let mut rounds = Rounds::new();
    for round in 0..plan.rounds {
        // Started again for each round, so that its memory contains nothing of the image.
        let what = Exported {
            image: "storm",
            from: &from,
            nbd: None,
            more: &["--chunk-memory", "1G", "--boot-trace", "off"],
        };
        let export = Export::start(plan, Command::new(&plan.headwater), &what)?;
        let reading =
            Reading { block_bytes: 128 << 10, readers: COLD_READERS, depth: 1, random: false, seconds: None };
        let read = fio::read(export.uri(), bytes, reading)?;
        let counters = export.counters()?;
        let from_store = counters.get("store_bytes")?;
        println!(
            "  round {}/{}  {COLD_READERS} readers got {:.0} MB/s; {} of {} were read from the store",
            round + 1,
            plan.rounds,
            read.megabytes_per_s(),
            headwater_block::size::format(from_store),
            headwater_block::size::format(distinct)
        );
        rounds.add(Comparison {
            case: "storm-cold",
            figure: "MiB from the store",
            ours: vec![mib(from_store)],
            peer: "distinct bytes".into(),
            theirs: vec![mib(distinct)],
            goal: Goal::AtMost(1.02),
        });
    }
    Ok(rounds.0)
}

/// Many readers of an image that is in memory, for Headwater and for the peers.
pub fn warm(plan: &Plan) -> Result<Vec<Comparison>> {
    let bytes: u64 = if plan.quick { 256 << 20 } else { 2 << 30 };
    let raw = plan.work_dir.join("storm.raw");
    make_disk(&raw, bytes, 2)?;
    let made = Made::import(plan, "storm-warm", &raw, "storm")?;
    let from = made.store().display().to_string();
    let what = Exported {
        image: "storm",
        from: &from,
        nbd: Some(format!("tcp:127.0.0.1:{}", free_port()?)),
        // A quarter more than the image, or half more for a small image, because the parts of the cache fill
        // unevenly.
        more: &["--chunk-memory", if plan.quick { "384M" } else { "2560M" }, "--boot-trace", "off"],
    };
    let ours = Export::start(plan, Command::new(&plan.headwater), &what)?;
    let peers = PEERS.iter().map(|peer| Served::start(peer, &raw, bytes)).collect::<Result<Vec<_>>>()?;
    let others = peers.iter().map(|served| (served.peer.name, served.uri.as_str()));
    let systems: Vec<_> = std::iter::once(("headwater", ours.uri())).chain(others).collect();
    for (name, uri) in &systems {
        let once = Reading { block_bytes: 1 << 20, readers: 1, depth: 4, random: false, seconds: None };
        fio::read(uri, bytes, once).with_context(|| format!("reading the image once: {name}"))?;
    }
    let mut rounds = Rounds::new();
    for round in 0..plan.rounds {
        for (block_bytes, rate, cpu) in [
            (128 << 10, "MB/s at 128 KiB", "CPU ms/GB at 128 KiB"),
            (1 << 20, "MB/s at 1 MiB", "CPU ms/GB at 1 MiB"),
        ] {
            let mut figures = vec![(0.0, 0.0); systems.len()];
            for turn in 0..systems.len() {
                let index = (round + turn) % systems.len();
                let (name, uri) = systems[index];
                let used = || match index.checked_sub(1) {
                    None => ours.cpu_seconds(),
                    Some(peer) => process::cpu_seconds(peers[peer].process.pid()),
                };
                let before = used()?;
                let seconds = Some(plan.seconds);
                let reading =
                    Reading { block_bytes, readers: WARM_READERS, depth: 1, random: false, seconds };
                let read = fio::read(uri, bytes, reading).with_context(|| format!("measuring {name}"))?;
                let cpu_ms = (used()? - before) * 1e3 / (read.megabytes() / 1e3);
                let kib = block_bytes >> 10;
                println!(
                    "  round {}/{}  {name:<16}{kib:>5} KiB{:>8.0} MB/s{cpu_ms:>8.0} ms CPU a GB",
                    round + 1,
                    plan.rounds,
                    read.megabytes_per_s()
                );
                figures[index] = (read.megabytes_per_s(), cpu_ms);
            }
            let (our_rate, our_cpu) = figures[0];
            for (served, (their_rate, their_cpu)) in peers.iter().zip(&figures[1..]) {
                let like = |figure, ours, theirs, goal| Comparison {
                    case: "storm-warm",
                    figure,
                    ours: vec![ours],
                    peer: served.peer.name.into(),
                    theirs: vec![theirs],
                    goal: if served.peer.is_limit { Goal::None } else { goal },
                };
                rounds.add(like(rate, our_rate, *their_rate, Goal::AtLeast(1.0)));
                rounds.add(like(cpu, our_cpu, *their_cpu, Goal::AtMost(1.0)));
            }
        }
    }
    drop(peers);
    std::fs::remove_file(&raw)?;
    Ok(rounds.0)
}

/// A server of the same bytes.
struct Peer {
    name: &'static str,
    /// Whether the peer moves no data; it shows the cost of the protocol and the client alone.
    is_limit: bool,
    command: fn(&Path, u64, &str) -> Command,
}

const PEERS: [Peer; 3] = [
    Peer {
        name: "nbdkit file",
        is_limit: false,
        command: |raw, _, port| {
            let mut command = nbdkit(port);
            command.arg("file").arg(raw);
            command
        },
    },
    Peer {
        name: "qemu-nbd",
        is_limit: false,
        command: |raw, _, port| {
            let mut command = Command::new("qemu-nbd");
            // `--shared=0`: any number of clients.
            command.args(["--read-only", "--persistent", "--shared=0", "--format=raw", "--bind=127.0.0.1"]);
            command.args(["--port", port]).arg(raw);
            command
        },
    },
    Peer {
        name: "nbdkit null",
        is_limit: true,
        command: |_, bytes, port| {
            let mut command = nbdkit(port);
            command.arg("null").arg(format!("size={bytes}"));
            command
        },
    },
];

fn nbdkit(port: &str) -> Command {
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--readonly", "-i", "127.0.0.1", "-p", port]);
    command
}

/// A running peer.
struct Served {
    peer: &'static Peer,
    process: Process,
    uri: String,
}

impl Served {
    fn start(peer: &'static Peer, raw: &Path, bytes: u64) -> Result<Self> {
        let port = free_port()?;
        let mut command = (peer.command)(&raw.canonicalize()?, bytes, &port.to_string());
        let process = Process::start(&mut command, peer.name)?;
        wait_for_port(port, &process)?;
        // Gives the peer time to close the connection that tested it.
        std::thread::sleep(Duration::from_millis(50));
        Ok(Self { peer, process, uri: format!("nbd://127.0.0.1:{port}") })
    }
}
