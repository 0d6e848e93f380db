//! Compares ublk with the kernel's NBD client, each as block device of a guest's kernel, on the same volume and load.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::streaming::Comparison;
use crate::targets::{Goal, Unavailable};
use crate::{Plan, interrupt};

/// Name for `--only`.
pub const NAME: &str = "attach";
/// Title of the case.
pub const TITLE: &str =
    "block device in a guest: ublk compared with the kernel's NBD client, 4 KiB random, depth 16";

/// The script that boots the guest, relative to the root of the source tree.
const SCRIPT: &str = "guest/attach-test";
/// The factor by which ublk must be faster than the kernel's NBD client.
const GOAL: f64 = 1.5;
/// Time limits for the boot, and for the preparation of each measurement, under emulation.
const BOOT_S: u64 = 300;
const PREPARATION_S: u64 = 60;
/// Lines of the guest's output that are shown after a failure.
const SHOWN_LINES: usize = 30;

/// One measurement in the guest.
#[derive(Clone, Debug, PartialEq)]
struct Speed {
    way: String,
    work: String,
    iops: f64,
}

impl Speed {
    /// Parses a line such as `SPEED ublk randread 11400`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("SPEED ")?.split_whitespace().map(str::to_owned);
        let (way, work, iops) = (words.next()?, words.next()?, words.next()?.parse().ok()?);
        (words.next().is_none() && iops > 0.0).then_some(Self { way, work, iops })
    }
}

/// Boots the guest, which measures both ways in each round.
pub fn run(plan: &Plan) -> Result<Vec<Comparison>> {
    println!("\n{NAME}: {TITLE}");
    if !Path::new(SCRIPT).is_file() {
        let text =
            format!("there is no {SCRIPT}, which boots the guest; run this at the root of the source tree");
        return Err(Unavailable(text).into());
    }
    compared(&measured(plan)?, plan.rounds)
}

/// Runs the guest, prints its output, and returns its measurements.
fn measured(plan: &Plan) -> Result<Vec<Speed>> {
    let rounds = u64::try_from(plan.rounds).unwrap_or(u64::MAX);
    // Reading and writing, each with ublk and with NBD.
    let patience_s = rounds
        .saturating_mul(u64::from(plan.seconds).saturating_mul(4).saturating_add(2 * PREPARATION_S))
        .saturating_add(BOOT_S);
    println!("  booting a guest (emulated); its first figures take a minute");
    let mut script = Command::new(SCRIPT)
        .arg(&plan.headwater)
        .arg("speed")
        .env("HEADWATER_SPEED_ROUNDS", plan.rounds.to_string())
        .env("HEADWATER_SPEED_SECONDS", plan.seconds.to_string())
        .env("HEADWATER_GUEST_SECONDS", patience_s.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {SCRIPT}"))?;
    interrupt::register(script.id());
    let mut lines: Vec<String> = Vec::new();
    let mut speeds: Vec<Speed> = Vec::new();
    if let Some(stdout) = script.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if let Some(speed) = Speed::parse(&line) {
                let before =
                    speeds.iter().filter(|known| (&known.way, &known.work) == (&speed.way, &speed.work));
                let (round, rounds) = (before.count() + 1, plan.rounds);
                println!(
                    "  round {round}/{rounds}  {:<5}{:<10}{:>10.0} IOPS",
                    speed.way, speed.work, speed.iops
                );
                speeds.push(speed);
            }
            lines.push(line);
        }
    }
    let status = script.wait();
    interrupt::unregister(script.id());
    let status = status.context("cannot wait for the guest's script")?;
    if !status.success() {
        return Err(failed(&status.to_string(), &lines));
    }
    Ok(speeds)
}

/// Why the script failed. Before the guest boots it prints nothing to standard output; its own messages are on
/// standard error.
fn failed(status: &str, guest_said: &[String]) -> anyhow::Error {
    if guest_said.is_empty() {
        let text =
            format!("{SCRIPT} did not boot a guest ({status}); it needs root, QEMU and Debian's packages");
        return Unavailable(text).into();
    }
    let last = guest_said.iter().skip(guest_said.len().saturating_sub(SHOWN_LINES));
    let said = last.map(String::as_str).collect::<Vec<_>>().join("\n");
    anyhow::anyhow!("{SCRIPT} ended ({status}); the guest's last lines:\n{said}")
}

/// Converts the measurements to comparisons. Ublk is ours; the kernel's NBD client is the peer.
fn compared(speeds: &[Speed], rounds: usize) -> Result<Vec<Comparison>> {
    let mut found = Vec::new();
    for (work, figure) in [("randread", "IOPS, reads"), ("randwrite", "IOPS, writes")] {
        let of = |way: &str| -> Vec<f64> {
            speeds.iter().filter(|speed| speed.way == way && speed.work == work).map(|s| s.iops).collect()
        };
        let (ours, theirs) = (of("ublk"), of("nbd"));
        if ours.len() != rounds || theirs.len() != rounds {
            let (ublk, nbd) = (ours.len(), theirs.len());
            bail!("in {rounds} rounds of {work}, the guest printed {ublk} figures of ublk and {nbd} of NBD");
        }
        let peer = "kernel NBD".into();
        found.push(Comparison { case: NAME, figure, ours, peer, theirs, goal: Goal::AtLeast(GOAL) });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_and_become_rows() {
        let text = "booting\nSPEED ublk randread 9000.5\nSPEED nbd randread 3000\nSPEED nbd randwrite 2000\n\
                    SPEED ublk randwrite 5000\nPASSED speed";
        let speeds: Vec<_> = text.lines().filter_map(Speed::parse).collect();
        let rows = compared(&speeds, 1).unwrap();
        let figures: Vec<_> = rows.iter().map(|row| (row.figure, row.ours[0], row.theirs[0])).collect();
        assert_eq!(figures, [("IOPS, reads", 9000.5, 3000.0), ("IOPS, writes", 5000.0, 2000.0)]);
        for bad in ["SPEED ublk randread", "SPEED ublk randread 0", "SPEED ublk randread x", "PASSED speed"] {
            assert_eq!(Speed::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_guest_that_never_booted_skips_the_case() {
        let is_left_out = |said: &[String]| failed("exit status: 1", said).is::<Unavailable>();
        assert!(is_left_out(&[]));
        let said: Vec<String> = (0..100).map(|line| format!("line {line}")).collect();
        assert!(!is_left_out(&said));
        let error = failed("exit status: 1", &said).to_string();
        assert!(
            error.ends_with("line 99") && error.contains("\nline 70\n") && !error.contains("line 69\n"),
            "{error}"
        );
    }

    #[test]
    fn a_round_that_is_missing_is_an_error() {
        let speeds: Vec<_> = ["ublk randread 1", "nbd randread 1", "ublk randwrite 1"]
            .iter()
            .filter_map(|text| Speed::parse(&format!("SPEED {text}")))
            .collect();
        let error = compared(&speeds, 1).unwrap_err().to_string();
        assert!(error.contains("1 figures of ublk and 0 of NBD"), "{error}");
    }
}
