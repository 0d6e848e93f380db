//! Simulates the disk requests of a desktop during boot, logon and session, from published rates.
//!
//! The parameters are in a file, each with its source and a grade of evidence. Equal seeds give equal requests.

mod files;
pub mod run;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use headwater_recorder::Content;
use serde::{Deserialize, Serialize};

use crate::random::Random;
use crate::trace::{Kind, Request};
use files::Files;
pub use files::USER_BYTES;

/// The parameters that are compiled into the program.
const STANDARD: &str = include_str!("desktop.toml");

/// The longest request of the model, in bytes.
const LONGEST_BYTES: u64 = 64 << 10;

/// A parameter of the model.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// Its value, in the unit that its name ends with.
    pub value: f64,
    /// Grade of evidence: R, read in the source; M, measured; D, derived; A, assumed.
    pub grade: String,
    /// The source of the value.
    pub source: String,
}

/// All parameters, by name.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Profile(BTreeMap<String, Parameter>);

impl Profile {
    /// The profile that is compiled into the program.
    pub fn standard() -> Result<Self> {
        Self::parse(STANDARD)
    }

    /// Reads a profile from a file.
    pub fn load(path: &Path) -> Result<Self> {
        let failed = || format!("cannot use the desktop model {}", path.display());
        let text = std::fs::read_to_string(path).with_context(failed)?;
        Self::parse(&text).with_context(failed)
    }

    fn parse(text: &str) -> Result<Self> {
        let profile: Self = toml::from_str(text)?;
        let standard: BTreeMap<String, Parameter> = toml::from_str(STANDARD)?;
        for name in standard.keys() {
            let Some(parameter) = profile.0.get(name) else { bail!("the parameter {name} is missing") };
            let most = if name.ends_with("_share") { 1.0 } else { 1e12 };
            if !(0.0..=most).contains(&parameter.value) {
                bail!("{name} is {}, but must be from 0 to {most}", parameter.value);
            }
        }
        if let Some(name) = profile.0.keys().find(|name| !standard.contains_key(*name)) {
            bail!("there is no parameter {name}");
        }
        for name in
            ["loop_write_iops", "loop_write_bytes", "boot_write_bytes", "logon_write_bytes", "loop_seconds"]
        {
            if profile.get(name) < 1.0 {
                bail!("{name} must be at least 1");
            }
        }
        Ok(profile)
    }

    /// The value of a parameter; 0 if it does not exist.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(name).map_or(0.0, |parameter| parameter.value)
    }

    /// All parameters: name, value, grade, source.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let row = |(name, parameter): (&String, &Parameter)| {
            vec![name.clone(), parameter.value.to_string(), parameter.grade.clone(), parameter.source.clone()]
        };
        self.0.iter().map(row).collect()
    }

    /// The profile with some values replaced, for a quick run.
    pub fn with(mut self, values: &[(&str, f64)]) -> Self {
        for (name, value) in values {
            if let Some(parameter) = self.0.get_mut(*name) {
                parameter.value = *value;
            }
        }
        self
    }
}

/// The requests of one machine. The times of each part begin at 0.
#[derive(Clone, Debug, Default)]
pub struct Life {
    /// The requests of the boot.
    pub boot: Vec<Request>,
    /// The requests from logon to logoff.
    pub session: Vec<Request>,
}

/// The parameters of sessions.
#[derive(Clone, Copy, Debug)]
pub struct Sessions {
    /// Users of one machine.
    pub users: u32,
    /// All users log on within this number of seconds.
    pub logons_s: f64,
    /// Loops of work of each user.
    pub loops: u32,
    /// Whether each loop begins with copying files.
    pub copies_files: bool,
}

/// Generates the requests of one machine.
pub struct Generator<'a> {
    profile: &'a Profile,
    random: Random,
}

const SECOND_US: f64 = 1e6;

/// A part of a session with requests of one kind, and the mean rate of its writes.
struct Part {
    name: &'static str,
    begin: f64,
    seconds: f64,
    rate: f64,
}

impl<'a> Generator<'a> {
    /// A generator with this seed.
    pub fn new(profile: &'a Profile, seed: u64) -> Self {
        Self { profile, random: Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6465_736b) }
    }

    /// Generates all requests of the machine.
    pub fn life(&mut self, sessions: &Sessions) -> Life {
        let mut life = Life::default();
        let mut files = Files::new(0);
        let boot_s = self.profile.get("boot_seconds");
        let boot = Part {
            name: "boot",
            begin: 0.0,
            seconds: boot_s,
            rate: self.profile.get("boot_writes") / boot_s.max(1.0),
        };
        self.part(&mut life.boot, &mut files, &boot);
        for user in 0..sessions.users {
            // The first user's files include those that the boot wrote.
            let mut own = if user == 0 {
                std::mem::replace(&mut files, Files::new(0))
            } else {
                Files::new(u64::from(user))
            };
            let begin = sessions.logons_s * f64::from(user) / f64::from(sessions.users.max(1));
            self.session(&mut life.session, &mut own, begin, sessions);
        }
        life.boot.sort_by_key(|request| request.time_us);
        life.session.sort_by_key(|request| request.time_us);
        life
    }

    fn session(&mut self, into: &mut Vec<Request>, files: &mut Files, begin: f64, sessions: &Sessions) {
        let logon_s = self.profile.get("logon_seconds");
        let rate = self.profile.get("logon_writes") / logon_s.max(1.0);
        self.part(into, files, &Part { name: "logon", begin, seconds: logon_s, rate });
        let loop_s = self.profile.get("loop_seconds");
        for number in 0..sessions.loops {
            let at = begin + logon_s + f64::from(number) * loop_s;
            if sessions.copies_files {
                self.copies(into, files, at);
            }
            let rate = self.profile.get("loop_write_iops");
            self.part(into, files, &Part { name: "loop", begin: at, seconds: loop_s, rate });
        }
    }

    /// Copies files in one burst, and deletes them later.
    fn copies(&mut self, into: &mut Vec<Request>, files: &mut Files, at: f64) {
        let bytes = self.profile.get("copy_file_bytes") as u64;
        let kept_s = self.profile.get("copy_kept_seconds");
        for number in 0..self.profile.get("copy_files") as u64 {
            let offset = files.temporary_offset(bytes);
            // About 10 MB/s, the rate of a client's disk.
            let begin = at + number as f64 * bytes as f64 / 1e7;
            let mut done = 0;
            while done < bytes {
                let part = LONGEST_BYTES.min((bytes - done).next_multiple_of(4096));
                let time_us = ((begin + done as f64 / 1e7) * SECOND_US) as u64;
                let content = Content::Packs(16);
                into.push(Request {
                    time_us,
                    offset: offset + done,
                    bytes: part,
                    kind: Kind::Write,
                    content,
                });
                done += part;
            }
            let time_us = ((begin + kept_s) * SECOND_US) as u64;
            let bytes = bytes.next_multiple_of(4096);
            into.push(Request { time_us, offset, bytes, kind: Kind::Discard, content: Content::Unknown });
        }
    }

    /// Generates the requests of a part.
    fn part(&mut self, into: &mut Vec<Request>, files: &mut Files, part: &Part) {
        let Part { name, begin, seconds, rate } = *part;
        let mean_bytes = self.profile.get(&format!("{name}_write_bytes"));
        let reads = self.profile.get(&format!("{name}_read_share"));
        let fresh = if name == "boot" { 0.8 } else { self.profile.get("fresh_share") };
        let (end, mut at) = (begin + seconds, begin);
        // The rate of all requests, from the rate of writes and the share of reads.
        let rate = rate / (1.0 - reads).max(0.01);
        loop {
            at += self.gap(1.0 / rate.max(1e-6));
            if at >= end {
                return;
            }
            let time_us = (at * SECOND_US) as u64;
            if self.random.share() < reads {
                if let Some(offset) = files.rewritten_offset(&mut self.random) {
                    let content = Content::Unknown;
                    into.push(Request { time_us, offset, bytes: 4096, kind: Kind::Read, content });
                }
                continue;
            }
            let bytes = self.write_bytes(mean_bytes);
            let is_fresh = self.random.share() < fresh;
            let offset = match files.rewritten_offset(&mut self.random).filter(|_| !is_fresh) {
                Some(offset) => offset,
                None => self.fresh(into, files, at, end, bytes),
            };
            let is_unaligned = self.random.share() < self.profile.get("unaligned_share");
            let offset = offset + if is_unaligned { 512 } else { 0 };
            let content = self.content();
            into.push(Request { time_us, offset, bytes, kind: Kind::Write, content });
        }
    }

    /// A new offset. Some of the new files are discarded before the end.
    fn fresh(&mut self, into: &mut Vec<Request>, files: &mut Files, at: f64, end: f64, bytes: u64) -> u64 {
        if self.random.share() >= self.profile.get("temporary_share") {
            return files.permanent_offset(bytes);
        }
        let offset = files.temporary_offset(bytes);
        let until = at + (end - at) * self.random.share();
        let time_us = (until * SECOND_US) as u64;
        into.push(Request { time_us, offset, bytes, kind: Kind::Discard, content: Content::Unknown });
        offset
    }

    /// The time until the next request. Most requests follow in a burst.
    fn gap(&mut self, mean: f64) -> f64 {
        const WITHIN_BURST: f64 = 0.3;
        let burst = self.profile.get("burst_share").min(0.99);
        let between = (1.0 - burst * WITHIN_BURST) / (1.0 - burst);
        let factor = if self.random.share() < burst { WITHIN_BURST } else { between };
        -(1.0 - self.random.share()).ln() * mean * factor
    }

    /// The length of a write: mostly 4 KiB, and some longer writes, so that the mean is right.
    fn write_bytes(&mut self, mean: f64) -> u64 {
        let longer = [(8192_u64, 0.5), (16_384, 0.25), (32_768, 0.15), (65_536, 0.1)];
        let mean_of_longer: f64 = longer.iter().map(|(bytes, share)| *bytes as f64 * share).sum();
        let share = ((mean - 4096.0) / (mean_of_longer - 4096.0)).clamp(0.0, 1.0);
        if self.random.share() >= share {
            return 4096;
        }
        let mut drawn = self.random.share();
        for (bytes, share) in longer {
            drawn -= share;
            if drawn < 0.0 {
                return bytes;
            }
        }
        LONGEST_BYTES
    }

    fn content(&mut self) -> Content {
        let drawn = self.random.share();
        let (zero, packs) = (self.profile.get("zero_share"), self.profile.get("packs_share"));
        match drawn {
            drawn if drawn < zero => Content::Zero,
            drawn if drawn < zero + packs => Content::Packs(7),
            _ => Content::Packs(16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desktop(seed: u64) -> Life {
        let profile = Profile::standard().unwrap();
        let sessions = Sessions { users: 1, logons_s: 0.0, loops: 4, copies_files: false };
        Generator::new(&profile, seed).life(&sessions)
    }

    #[test]
    fn counts_and_lengths_are_those_of_the_parameters() {
        let lives: Vec<Life> = (0..8).map(desktop).collect();
        let count =
            |requests: &[Request], kind| requests.iter().filter(|request| request.kind == kind).count();
        let near =
            |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.06, "{found} {expected}");
        let boots: usize = lives.iter().map(|life| count(&life.boot, Kind::Write)).sum();
        near(boots as f64 / 8.0, 3700.0);
        let boot_reads: usize = lives.iter().map(|life| count(&life.boot, Kind::Read)).sum();
        near(boot_reads as f64 / (boot_reads + boots) as f64, 0.13);
        let in_loops = |request: &&Request| request.kind == Kind::Write && request.time_us > 60_000_000;
        let writes: Vec<Request> =
            lives.iter().flat_map(|life| life.session.iter().filter(in_loops).copied()).collect();
        near(writes.len() as f64 / 8.0 / (4.0 * 720.0), 9.2);
        near(writes.iter().map(|write| write.bytes as f64).sum::<f64>() / writes.len() as f64, 9216.0);
        assert!(lives.iter().all(|life| life.session.is_sorted_by_key(|request| request.time_us)));
    }

    #[test]
    fn equal_seeds_give_equal_desktops() {
        assert_eq!(desktop(1).session, desktop(1).session);
        assert_ne!(desktop(1).session, desktop(2).session);
    }

    #[test]
    fn discards_follow_the_writes_of_their_places() {
        let life = desktop(3);
        let discards: Vec<&Request> =
            life.session.iter().filter(|request| request.kind == Kind::Discard).collect();
        assert!(discards.len() > 1000);
        for discard in discards.iter().take(200) {
            let is_before = |request: &&Request| {
                request.kind == Kind::Write && request.offset / 4096 == discard.offset / 4096
            };
            let first = life.session.iter().find(is_before).unwrap();
            assert!(first.time_us <= discard.time_us);
        }
    }

    #[test]
    fn a_profile_that_lacks_or_breaks_a_parameter_is_refused() {
        let refused =
            |from: &str, to: &str| format!("{:#}", Profile::parse(&STANDARD.replace(from, to)).unwrap_err());
        assert!(refused("[fresh_share]", "[fresh_shape]").contains("fresh_share is missing"));
        assert!(
            refused("value = 0.6", "value = 1.5").contains("fresh_share is 1.5, but must be from 0 to 1")
        );
        assert!(
            refused("value = 9.2", "value = \"x\"").contains("line"),
            "{}",
            refused("value = 9.2", "value = \"x\"")
        );
        assert!(refused("value = 9.2", "value = 0").contains("loop_write_iops must be at least 1"));
    }
}
