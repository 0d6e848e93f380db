//! The file of DHCP leases: one line for each change, written before the answer is sent.
//!
//! ```text
//!   10.77.0.100 52:54:00:77:00:01 bound 1764447000        address, card, state, until (seconds since 1970)
//! ```
//! A later line replaces earlier lines of the same address. The file is rewritten at each start, and after
//! [`NEW_LINES_MAX`] lines. It is not synced: after a power failure the newest leases may be missing. Then probes
//! keep their addresses from being given twice.

use std::fs::File;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use headwater_dhcp::leases::{Entry, State};
use headwater_dhcp::{Leases, Record};

use crate::error::BootError;

/// The number of lines after which the file is rewritten.
const NEW_LINES_MAX: usize = 100_000;

/// The open lease file.
#[derive(Debug)]
pub(crate) struct LeaseFile {
    path: PathBuf,
    file: File,
    /// Lines written since the file was rewritten.
    new_lines: usize,
    /// A write failed, perhaps in the middle of a line.
    is_torn: bool,
}

impl LeaseFile {
    /// Reads the file, if it exists, and rewrites it without outdated lines.
    pub(crate) fn open(path: &Path, leases: &mut Leases) -> Result<Self, BootError> {
        let failed = |source| BootError::Leases { path: path.to_owned(), source };
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read.map_err(failed)?,
        };
        let (mut number, mut dropped) = (0, 0);
        // A last line without a line end was not written completely, so its answer was not sent.
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            number += 1;
            let damaged = || BootError::DamagedLeases { path: path.to_owned(), line: number };
            dropped += usize::from(!leases.restore(record(line).ok_or_else(damaged)?));
        }
        if dropped > 0 {
            tracing::info!(path = %path.display(), dropped, "dropped leases of networks that are no longer configured");
        }
        let file = write(path, &leases.records()).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, new_lines: 0, is_torn: false })
    }

    /// Writes the changed records.
    pub(crate) fn keep(&mut self, leases: &mut Leases) -> io::Result<()> {
        let changes = leases.take_changes();
        if changes.is_empty() && !self.is_torn {
            return Ok(());
        }
        if self.is_torn || self.new_lines > NEW_LINES_MAX {
            self.file = write(&self.path, &leases.records())?;
            (self.new_lines, self.is_torn) = (0, false);
            return Ok(());
        }
        let text: String = changes.iter().map(line).collect();
        self.is_torn = true;
        self.file.write_all(text.as_bytes())?;
        self.is_torn = false;
        self.new_lines += changes.len();
        Ok(())
    }
}

/// Writes a new file, and replaces the old one when the new one is complete.
fn write(path: &Path, records: &[Record]) -> io::Result<File> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(records.iter().map(line).collect::<String>().as_bytes())?;
    file.sync_data()?;
    std::fs::rename(&new, path)?;
    Ok(file)
}

fn line(record: &Record) -> String {
    let Entry { mac, state, until_s } = record.entry;
    let state = if state == State::Declined { "declined" } else { "bound" };
    format!("{} {mac} {state} {until_s}\n", record.address)
}

fn record(line: &str) -> Option<Record> {
    let mut words = line.split(' ');
    let address: Ipv4Addr = words.next()?.parse().ok()?;
    let mac = words.next()?.parse().ok()?;
    let state = match words.next()? {
        "bound" => State::Bound,
        "declined" => State::Declined,
        _ => return None,
    };
    let until_s = words.next()?.parse().ok()?;
    words.next().is_none().then_some(Record { address, entry: Entry { mac, state, until_s } })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use headwater_dhcp::{Mac, MessageType, Outcome, Packet, Subnet, Subnets};

    use super::*;

    fn leases() -> Leases {
        let subnet = Subnet {
            network: Ipv4Addr::new(10, 77, 0, 0),
            prefix: 22,
            range: Some((Ipv4Addr::new(10, 77, 1, 0), Ipv4Addr::new(10, 77, 2, 255))),
            router: None,
            dns: Vec::new(),
            domain: None,
            lease_s: 600,
            fixed: HashMap::new(),
        };
        Leases::new(Subnets::new(vec![subnet]).unwrap(), Ipv4Addr::new(10, 77, 0, 2))
    }

    fn renewal(number: u8) -> Packet {
        let mac = Mac([2, 0, 0, 0, 0, number]);
        Packet { ciaddr: Ipv4Addr::new(10, 77, 1, number), ..Packet::of_client(1, mac, MessageType::Request) }
    }

    #[test]
    fn leases_survive_a_daemon_that_was_killed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leases");
        let mut before = leases();
        let mut file = LeaseFile::open(&path, &mut before).unwrap();
        for number in 1..=250 {
            assert!(matches!(before.handle(&renewal(number), 1000), Outcome::Answer(..)));
            file.keep(&mut before).unwrap();
        }
        // The server was killed in the middle of a line.
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "10.77.1.9 02:00").unwrap();
        let mut after = leases();
        let mut file = LeaseFile::open(&path, &mut after).unwrap();
        assert_eq!(after.records(), before.records());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 250);
        // The next record begins on a line of its own.
        after.handle(&renewal(7), 1100);
        file.keep(&mut after).unwrap();
        let last = std::fs::read_to_string(&path).unwrap().lines().last().map(str::to_owned);
        assert_eq!(last.as_deref(), Some("10.77.1.7 02:00:00:00:00:07 bound 1700"));
    }

    #[test]
    fn a_damaged_file_is_refused_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leases");
        for damaged in ["x", "10.77.1.1 02:00:00:00:00:01 bound", "10.77.1.1 02:00:00:00:00:01 held 5", ""] {
            let text = format!("10.77.1.1 02:00:00:00:00:01 bound 5\n{damaged}\n");
            std::fs::write(&path, &text).unwrap();
            let why = LeaseFile::open(&path, &mut leases()).unwrap_err().to_string();
            assert!(why.contains("line 2 of"), "{damaged}: {why}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "it was changed");
        }
    }
}
