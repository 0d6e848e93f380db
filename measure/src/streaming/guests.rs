//! Measures whole guests: the boot over a slow link, the boot while a server fails, and the pause of a running guest
//! whose disk is sealed as a version.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::Value;

use super::line::{FAR, Line};
use super::server::{Offer, Tls};
use super::stores::Made;
use super::{Comparison, Rounds, need_guest};
use crate::Plan;
use crate::iscsi::free_port;
use crate::process::read_bytes;
use crate::systems::{Process, own_dir};
use crate::targets::Goal;

const DELAY_MS: u64 = 2;
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);
/// The most rounds: an emulated boot takes about 15 s.
const ROUNDS_MAX: usize = 3;
/// A guest that has read this many bytes has begun to boot.
const BOOTING_BYTES: f64 = 3e6;
/// More bytes than a request that returns no chunks causes a server to read.
const ANSWER_BYTES: u64 = 16 << 10;
/// The longest permitted stall of a boot.
const STALL_MAX_S: f64 = 2.0;

/// Name of the case for `--only`.
pub const SEAL_PAUSE: &str = "seal-pause";
/// The longest permitted pause of a guest while a version is made of its disk.
const PAUSE_MAX_MS: f64 = 50.0;
/// A seal takes a second, and long pauses are rare, so each round has several seals.
const SEALS_OF_A_ROUND: usize = 10;

/// A machine that `headwater run` runs.
struct Machine {
    process: Process,
    data_dir: PathBuf,
    headwater: PathBuf,
}

impl Machine {
    fn start(plan: &Plan, mut command: Command, from: &str, more: &[&str]) -> Result<Self> {
        // The directory contains sockets, and the path of a socket may have at most 107 bytes.
        let data_dir = plan.sockets.join("data");
        let _ = std::fs::remove_dir_all(&data_dir);
        own_dir(&data_dir)?;
        command
            // The name includes the version: `guest` alone would mean a file of this name, if it exists.
            .args(["run", "guest@1", "--from", from, "--ram", "64M", "--disk", "2G", "--data-dir"])
            .arg(&data_dir)
            .args(more);
        let process = Process::start(&mut command, "headwater run")?;
        Ok(Self { process, data_dir, headwater: plan.headwater.clone() })
    }

    /// The boot time in seconds, as the command prints it.
    fn booted(&mut self) -> Result<f64> {
        let line = self.process.wait_for_output("is running, booted in", BOOT_TIMEOUT)?;
        let text = line.rsplit_once("booted in ").and_then(|(_, text)| text.split_whitespace().next());
        text.and_then(|text| text.parse().ok())
            .with_context(|| format!("the line '{line}' contains no boot time"))
    }

    /// Waits until the guest reads. Opening the store causes requests too, so it waits for more bytes than those.
    fn has_begun(&self) -> Result<()> {
        let begun = Instant::now();
        while self.metric("headwater_image_read_bytes_total").unwrap_or(0.0) < BOOTING_BYTES {
            if begun.elapsed() > BOOT_TIMEOUT {
                bail!("the machine did not begin to read its image within {} s", BOOT_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// The JSON output of a `headwater` command on the same data directory.
    fn ask(&self, command: &[&str]) -> Result<Value> {
        let mut asking = Command::new(&self.headwater);
        let output = asking.arg("--json").args(command).arg("--data-dir").arg(&self.data_dir).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("headwater {} printed no JSON: {said}", command.join(" ")))
    }

    /// A metric of the host.
    fn metric(&self, name: &str) -> Result<f64> {
        let stats = self.ask(&["stats"])?;
        let samples =
            stats.get("samples").and_then(Value::as_array).context("'headwater stats' printed no samples")?;
        let found = samples.iter().find(|sample| sample.get("metric").and_then(Value::as_str) == Some(name));
        found
            .and_then(|sample| sample.get("value")?.as_f64())
            .with_context(|| format!("'headwater stats' has no metric {name}"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The second signal ends the guest at once: it is no longer needed.
        let _ = self.process.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Compares the guest's boot over the line, with a trace of earlier boots, with its boot from a store on this host.
pub fn slow_link(plan: &Plan) -> Result<Vec<Comparison>> {
    need_guest(plan)?;
    let mut line = Line::start()?;
    let made = Made::import(plan, "guest-slow", &plan.image, "guest")?;
    let here = made.store().display().to_string();
    // The first boot records the trace. It also reads the guest's image into the page cache, for the boots from this
    // host.
    let first = Machine::start(plan, line.near(&plan.headwater), &here, &[])?.booted()?;
    println!("  the first boot was recorded; it took {first:.1} s");
    let traces = made.store().join("traces");
    let kept = std::fs::read_dir(&traces).map_or(0, Iterator::count);
    if kept != 1 {
        bail!("the first boot must leave one boot trace in {}, but there are {kept} files", traces.display());
    }
    let tls = Tls::make(&plan.sockets, &[FAR])?;
    let offer = Offer::start(line.far(&plan.headwater), &made.store(), free_port()?, &tls)?;
    let there = format!("https://{FAR}:{}", line.relay(offer.port(), DELAY_MS)?);
    let ca = tls.authority.display().to_string();
    let ways: [(&str, &str, &[&str]); 3] = [
        ("with its trace", &there, &["--ca", &ca]),
        ("from this host", &here, &["--boot-trace", "off"]),
        ("without a trace", &there, &["--ca", &ca, "--boot-trace", "off"]),
    ];
    let mut rounds = Rounds::new();
    let count = plan.rounds.min(ROUNDS_MAX);
    for round in 0..count {
        let mut seconds = [0.0; 3];
        for turn in 0..ways.len() {
            let index = (round + turn) % ways.len();
            let (name, from, more) = ways[index];
            seconds[index] = Machine::start(plan, line.near(&plan.headwater), from, more)?
                .booted()
                .with_context(|| format!("booting {name}"))?;
            println!("  round {}/{count}  {name:<18}{:>7.1} s", round + 1, seconds[index]);
        }
        let [trace, local, plain] = seconds;
        let like = |ours, peer: &str, theirs, goal| Comparison {
            case: "guest-slow-link",
            figure: "boot, seconds",
            ours: vec![ours],
            peer: peer.into(),
            theirs: vec![theirs],
            goal,
        };
        rounds.add(like(trace, ways[1].0, local, Goal::AtMost(1.2)));
        rounds.add(like(trace, ways[2].0, plain, Goal::None));
    }
    Ok(rounds.0)
}

/// The way in which a server fails during a boot.
#[derive(Clone, Copy)]
enum Failure {
    /// Its process is killed: connections end, and new connections are refused immediately.
    Dies,
    /// It stops answering, like a host after a power failure.
    Hangs,
}

/// One of two servers fails while the guest boots. The guest boots without a trace, so that it reads throughout the
/// boot.
pub fn failover(plan: &Plan) -> Result<Vec<Comparison>> {
    need_guest(plan)?;
    let mut line = Line::start()?;
    let made = Made::import(plan, "guest-failover", &plan.image, "guest")?;
    let tls = Tls::make(&plan.sockets, &[FAR])?;
    let ca = tls.authority.display().to_string();
    let more = ["--ca", ca.as_str(), "--boot-trace", "off"];
    let mut rounds = Rounds::new();
    // `true`: the server that is just answering fails.
    let failures = [
        ("server in use killed", true, Failure::Dies),
        ("other server killed", false, Failure::Dies),
        ("server in use hangs", true, Failure::Hangs),
        ("other server hangs", false, Failure::Hangs),
    ];
    let mut longest = 0f64;
    let count = plan.rounds.min(ROUNDS_MAX);
    for round in 0..count {
        println!("  round {}/{count}", round + 1);
        let (mut undisturbed, mut killed) = (None, 0.0);
        for (name, answers, trouble) in failures {
            let mut offers = Vec::new();
            let mut urls = Vec::new();
            for _ in 0..2 {
                let offer = Offer::start(line.far(&plan.headwater), &made.store(), free_port()?, &tls)?;
                urls.push(format!("https://{FAR}:{}", line.relay(offer.port(), DELAY_MS)?));
                offers.push(offer);
            }
            let from = urls.join(",");
            let half = match undisturbed {
                Some(seconds) => seconds / 2.0,
                None => {
                    let seconds = Machine::start(plan, line.near(&plan.headwater), &from, &more)?.booted()?;
                    println!("  undisturbed  {seconds:.1} s");
                    *undisturbed.insert(seconds) / 2.0
                }
            };
            let mut machine = Machine::start(plan, line.near(&plan.headwater), &from, &more)?;
            machine.has_begun()?;
            std::thread::sleep(Duration::from_secs_f64(half));
            let signal = match trouble {
                Failure::Dies => Signal::KILL,
                Failure::Hangs => Signal::STOP,
            };
            let answering = answering_server(&offers)?;
            let victim = offers.iter().enumerate().find(|(at, _)| (*at == answering) == answers);
            let (_, victim) = victim.context("there are two servers")?;
            victim.process().signal(signal)?;
            let seconds = machine.booted().with_context(|| format!("booting while {name}"))?;
            let stall = machine.metric("headwater_image_longest_read_seconds")?;
            let went_on = machine.metric("headwater_image_failovers_total")?;
            longest = longest.max(stall);
            if matches!(trouble, Failure::Dies) {
                killed += went_on;
            }
            println!("  {name:<21} {seconds:>5.1} s, longest stall {stall:.3} s, {went_on} failovers");
            if matches!(trouble, Failure::Hangs) {
                victim.process().signal(Signal::CONT)?;
            }
            rounds.add(of_failover("boot, seconds", seconds, "undisturbed", half * 2.0, Goal::None));
            rounds.add(of_failover("longest stall of a boot, s", stall, "2 s", STALL_MAX_S, Goal::None));
        }
        // If the server was not being read from, its failure proves nothing.
        let figure = "failovers, of servers killed in use";
        rounds.add(of_failover(figure, killed, "1", 1.0, Goal::AtLeast(1.0)));
    }
    rounds.add(of_failover("longest stall of all, s", longest, "2 s", STALL_MAX_S, Goal::AtMost(1.0)));
    Ok(rounds.0)
}

/// Waits until one of the servers has read part of an answer, and returns its index. Sending the answer over the line
/// takes longer than this check.
fn answering_server(offers: &[Offer]) -> Result<usize> {
    let read = || offers.iter().map(|offer| read_bytes(offer.process().pid())).collect::<Result<Vec<u64>>>();
    let (mut before, until) = (read()?, Instant::now() + BOOT_TIMEOUT);
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
        let now = read()?;
        let mut grown = now.iter().zip(&before).map(|(now, before)| now.saturating_sub(*before));
        if let Some(answering) = grown.position(|bytes| bytes >= ANSWER_BYTES) {
            return Ok(answering);
        }
        before = now;
    }
    bail!("the booting guest reads from neither server")
}

fn of_failover(figure: &'static str, ours: f64, peer: &str, theirs: f64, goal: Goal) -> Comparison {
    Comparison {
        case: "guest-failover",
        figure,
        ours: vec![ours],
        peer: peer.into(),
        theirs: vec![theirs],
        goal,
    }
}

/// Seals the disk of a running guest repeatedly. The longest pause is judged in addition to the median, because one
/// long pause is enough to disturb a guest.
pub fn seal_pause(plan: &Plan) -> Result<Vec<Comparison>> {
    need_guest(plan)?;
    let made = Made::import(plan, SEAL_PAUSE, &plan.image, "guest")?;
    let here = made.store().display().to_string();
    let mut machine = Machine::start(plan, Command::new(&plan.headwater), &here, &["--boot-trace", "off"])?;
    machine.booted()?;
    let (mut guests_ms, mut disks_ms) = (Vec::new(), Vec::new());
    let seals = plan.rounds * SEALS_OF_A_ROUND;
    for seal in 1..=seals {
        let sealed = machine.ask(&["machine", "seal", "guest-1"])?;
        let pause = sealed.get("pause").context("the answer of the seal has no pause")?;
        let Some(guest_ms) = pause.get("guest_ms").and_then(Value::as_f64) else {
            bail!("the guest's file systems were not frozen: {pause}");
        };
        let disk_us = pause
            .get("disk_us")
            .and_then(Value::as_f64)
            .context("the answer of the seal has no pause of the disk")?;
        println!("  seal {seal}/{seals}  guest {guest_ms} ms, disk {disk_us} us");
        guests_ms.push(guest_ms);
        disks_ms.push(disk_us / 1e3);
    }
    let mut found = Vec::new();
    for (figure, longest, ours) in [
        ("guest stands still, ms", "guest stands still, longest, ms", guests_ms),
        ("disk answers nothing, ms", "disk answers nothing, longest, ms", disks_ms),
    ] {
        let most = ours.iter().copied().fold(0.0, f64::max);
        for (figure, ours) in [(figure, ours), (longest, vec![most])] {
            let (peer, theirs) = ("50 ms".into(), vec![PAUSE_MAX_MS]);
            found.push(Comparison { case: SEAL_PAUSE, figure, ours, peer, theirs, goal: Goal::AtMost(1.0) });
        }
    }
    Ok(found)
}
