//! Sends a boot's recorded reads over the slow link to a peer: nbdkit over NBD, one request at a time.

use std::io::{Read as _, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_block::blocking;
use headwater_nbd::Client;

use super::boot_log::Read;
use super::line::{FAR, Line};
use crate::iscsi::free_port;
use crate::systems::Process;

/// The peer's name in the results.
pub const PEER: &str = "on demand, nbdkit file";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// nbdkit with the disk as a file, at the far end of the line.
pub struct Nbdkit {
    _process: Process,
    port: u16,
}

impl Nbdkit {
    /// Starts nbdkit.
    pub fn start(line: &Line, disk: &Path) -> Result<Self> {
        let port = free_port()?;
        let mut command = line.far("nbdkit".as_ref());
        command.args([
            "--foreground",
            "--readonly",
            "--ipaddr",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "file",
        ]);
        command.arg(disk.canonicalize()?);
        Ok(Self { _process: Process::start(&mut command, "nbdkit")?, port })
    }

    /// Its loopback port at the far end.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Seconds from connecting to the last answer, through this port of the line.
pub fn seconds(line: &Line, port: u16, reads: &[Read]) -> Result<f64> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut command = line.near(&program);
    command.args(["--read-over", &format!("nbd://{FAR}:{port}/")]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot read over NBD at the near end")?;
    let list: String = reads.iter().map(|read| format!("{} {}\n", read.offset, read.len)).collect();
    // The child reads the whole list before it sends the first request.
    child.stdin.take().context("the child has no standard input")?.write_all(list.as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.trim().parse() {
        Ok(seconds) if output.status.success() => Ok(seconds),
        _ => bail!("reading over NBD failed: {said}{}", String::from_utf8_lossy(&output.stderr).trim()),
    }
}

/// Implements `--read-over URI`.
pub fn read_over(uri: &str) -> Result<()> {
    let mut list = String::new();
    std::io::stdin().read_to_string(&mut list)?;
    let reads = parse(&list)?;
    // The server may still be starting.
    let begun = Instant::now();
    let (start, disk) = loop {
        let start = Instant::now();
        match Client::open(uri) {
            Ok(disk) => break (start, disk),
            Err(_) if begun.elapsed() < CONNECT_TIMEOUT => std::thread::sleep(Duration::from_millis(50)),
            Err(error) => return Err(error).with_context(|| format!("cannot connect to {uri}")),
        }
    };
    let mut buffer = Vec::new();
    for read in &reads {
        buffer.resize(read.len, 0);
        blocking::read(&*disk, read.offset, &mut buffer)?;
    }
    println!("{}", start.elapsed().as_secs_f64());
    Ok(())
}

fn parse(list: &str) -> Result<Vec<Read>> {
    let read = |line: &str| {
        let (offset, len) = line.split_once(' ')?;
        Some(Read { offset: offset.parse().ok()?, len: len.parse().ok()? })
    };
    list.lines().map(|line| read(line).with_context(|| format!("'{line}' is not OFFSET LENGTH"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_reads_is_understood_or_refused() {
        let reads = parse("0 512\n65536 4096\n").unwrap();
        assert_eq!(reads, [Read { offset: 0, len: 512 }, Read { offset: 65_536, len: 4096 }]);
        assert!(parse("12").unwrap_err().to_string().contains("'12'"));
    }
}
