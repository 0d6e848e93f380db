//! Compares importing and exporting an image with the same conversions by qemu-img, through a compressed qcow2.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::Plan;
use crate::fio::{self, Job, Target};
use crate::systems::{Process, make_file, own_dir};

/// Name for `--only`.
pub const NAME: &str = "import";
/// Title of the case.
pub const TITLE: &str =
    "importing the Debian guest, exporting it to raw and qcow2, compared with qemu-img and a zstd qcow2";

/// The results of one system: importing an image into compressed form, and exporting it to raw and to uncompressed
/// qcow2.
#[derive(Clone, Debug, Serialize)]
pub struct ImportResult {
    /// The name of the system.
    pub system: &'static str,
    /// Seconds of the import, in each round.
    pub seconds: Vec<f64>,
    /// Size of the compressed image on disk.
    pub size_bytes: u64,
    /// Seconds of the export to raw, in each round.
    pub export_seconds: Vec<f64>,
    /// Seconds of the export to uncompressed qcow2, in each round.
    pub qcow2_seconds: Vec<f64>,
    /// Bytes of the raw file that are not in holes.
    pub data_bytes: u64,
    /// Seconds for writing as many bytes to the disk with O_DIRECT, in each round; measured for our results only.
    pub disk_seconds: Vec<f64>,
}

/// The result of one system in one round.
struct Round {
    import: Duration,
    size_bytes: u64,
    export: Duration,
    qcow2: Duration,
    data_bytes: u64,
}

/// The peers: name, and options of `qemu-img convert`.
const PEERS: [(&str, &[&str]); 2] = [("qemu-img", &[]), ("qemu-img -m 16 -W", &["-m", "16", "-W"])];

/// Imports and exports the plan's image in each round.
pub fn run(plan: &Plan) -> Result<Vec<ImportResult>> {
    println!("\n{NAME}: {TITLE}");
    crate::streaming::need_guest(plan)?;
    let names = std::iter::once("headwater").chain(PEERS.iter().map(|(name, _)| *name));
    let mut results: Vec<ImportResult> = names
        .map(|system| ImportResult {
            system,
            seconds: Vec::new(),
            size_bytes: 0,
            export_seconds: Vec::new(),
            qcow2_seconds: Vec::new(),
            data_bytes: 0,
            disk_seconds: Vec::new(),
        })
        .collect();
    // All systems read from the page cache, so that the first does not wait for the disk.
    std::io::copy(&mut std::fs::File::open(&plan.image)?, &mut std::io::sink())?;
    for round in 0..plan.rounds {
        for turn in 0..results.len() {
            let index = (round + turn) % results.len();
            let measured = match index.checked_sub(1) {
                None => ours(plan)?,
                Some(peer) => qemu_img(plan, PEERS[peer].1)?,
            };
            let result = &mut results[index];
            result.seconds.push(measured.import.as_secs_f64());
            result.size_bytes = measured.size_bytes;
            result.export_seconds.push(measured.export.as_secs_f64());
            result.qcow2_seconds.push(measured.qcow2.as_secs_f64());
            result.data_bytes = measured.data_bytes;
            if index == 0 {
                result.disk_seconds.push(bare_disk(plan, measured.data_bytes, round)?);
            }
            println!(
                "  round {}/{}  {:<26}{:>8.2} s  {}  and back in {:.2} s, to qcow2 in {:.2} s",
                round + 1,
                plan.rounds,
                result.system,
                measured.import.as_secs_f64(),
                headwater_block::size::format(measured.size_bytes),
                measured.export.as_secs_f64(),
                measured.qcow2.as_secs_f64()
            );
        }
    }
    Ok(results)
}

/// Starts a daemon on an empty data directory, and imports and exports through it, as a user would.
fn ours(plan: &Plan) -> Result<Round> {
    let data_dir = plan.work_dir.join("import");
    own_dir(&data_dir)?;
    let data_dir = data_dir.canonicalize()?;
    let mut serve = Command::new(&plan.headwater);
    let daemon = Process::start(serve.arg("serve").arg("--data-dir").arg(&data_dir), "headwater serve")?;
    wait_for(&data_dir.join("api.sock"), &daemon)?;
    let raw = data_dir.join("exported.raw");
    let command = |arguments: &[&str], path: &Path, more: &[&str]| {
        let mut command = Command::new(&plan.headwater);
        command.arg("image").args(arguments).arg(path).args(more).env("HEADWATER_DATA_DIR", &data_dir);
        timed(&mut command)
    };
    let import = command(&["import"], &plan.image.canonicalize()?, &["--name", "measured"])?;
    let export = command(&["export", "measured"], &raw, &[])?;
    let data_bytes = allocated_bytes(&raw)?;
    std::fs::remove_file(&raw)?;
    let qcow2 = command(&["export", "measured"], &data_dir.join("exported.qcow2"), &[])?;
    drop(daemon);
    let size_bytes = tree_bytes(&data_dir.join("store"))?;
    std::fs::remove_dir_all(&data_dir)?;
    Ok(Round { import, size_bytes, export, qcow2, data_bytes })
}

/// The time for writing a new file of this size directly to the disk.
fn bare_disk(plan: &Plan, bytes: u64, round: usize) -> Result<f64> {
    let path = plan.work_dir.join("disk.limit");
    make_file(&path, bytes, false)?;
    let written = fio::run(&Target::File(path.clone()), bytes, Job::Fill, round)?;
    std::fs::remove_file(&path)?;
    println!("  the disk itself: {:.2} s for {}", written.seconds, headwater_block::size::format(bytes));
    Ok(written.seconds)
}

/// Runs a command to its end.
fn timed(command: &mut Command) -> Result<Duration> {
    let start = Instant::now();
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let took = start.elapsed();
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(took)
}

fn allocated_bytes(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    // In units of 512 bytes, whatever the file system's block is (stat(2)).
    Ok(std::fs::metadata(path)?.blocks() * 512)
}

fn wait_for(socket: &Path, daemon: &Process) -> Result<()> {
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if start.elapsed() > Duration::from_secs(30) {
            bail!("headwater serve was not ready within 30 s: {}", daemon.last_line());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn qemu_img(plan: &Plan, options: &[&str]) -> Result<Round> {
    let (packed, raw) = (plan.work_dir.join("converted.qcow2"), plan.work_dir.join("converted.raw"));
    let convert = || {
        let mut command = Command::new("qemu-img");
        command.arg("convert").args(options);
        command
    };
    let mut pack = convert();
    pack.args(["-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd"])
        .arg(&plan.image)
        .arg(&packed);
    let import = timed(&mut pack)?;
    let size_bytes = std::fs::metadata(&packed)?.len();
    let unpack =
        |format, to: &Path| timed(convert().args(["-f", "qcow2", "-O", format]).arg(&packed).arg(to));
    let export = unpack("raw", &raw)?;
    let data_bytes = allocated_bytes(&raw)?;
    std::fs::remove_file(&raw)?;
    let unpacked = plan.work_dir.join("unpacked.qcow2");
    let qcow2 = unpack("qcow2", &unpacked)?;
    std::fs::remove_file(&unpacked)?;
    std::fs::remove_file(&packed)?;
    Ok(Round { import, size_bytes, export, qcow2, data_bytes })
}

/// Total size of the files below a directory.
fn tree_bytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { tree_bytes(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::tree_bytes;

    #[test]
    fn a_tree_is_the_sum_of_its_files() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a/b"), [0; 300]).unwrap();
        std::fs::write(folder.path().join("c"), [0; 21]).unwrap();
        assert_eq!(tree_bytes(folder.path()).unwrap(), 321);
    }
}
