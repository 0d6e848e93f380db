//! Importing an image, beside qemu-img making a compressed qcow2 of it.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::Plan;
use crate::systems::Process;

/// Name for `--only`.
pub const NAME: &str = "import";
/// What it shows.
pub const TITLE: &str = "importing the Debian guest, beside qemu-img convert -c -o compression_type=zstd";

/// One way of making a compressed image.
#[derive(Clone, Debug, Serialize)]
pub struct ImportResult {
    /// Who.
    pub system: &'static str,
    /// One for each round.
    pub seconds: Vec<f64>,
    /// What it takes on disk.
    pub size_bytes: u64,
}

/// The peers: options of `qemu-img convert` in front of the formats.
const PEERS: [(&str, &[&str]); 2] = [("qemu-img", &[]), ("qemu-img -m 16 -W", &["-m", "16", "-W"])];

/// Imports the plan's image in every round. Nothing where there is no image.
pub fn run(plan: &Plan) -> Result<Vec<ImportResult>> {
    println!("\n{NAME}: {TITLE}");
    if !plan.image.is_file() {
        println!("  left out: there is no {}; `make guest` builds it", plan.image.display());
        return Ok(Vec::new());
    }
    let names = std::iter::once("headwater").chain(PEERS.iter().map(|(name, _)| *name));
    let mut results: Vec<ImportResult> =
        names.map(|system| ImportResult { system, seconds: Vec::new(), size_bytes: 0 }).collect();
    // Everybody reads from the page cache, so that the first one does not pay for the disk.
    std::io::copy(&mut std::fs::File::open(&plan.image)?, &mut std::io::sink())?;
    for round in 0..plan.rounds {
        for turn in 0..results.len() {
            let index = (round + turn) % results.len();
            let (took, size_bytes) = match index.checked_sub(1) {
                None => ours(plan)?,
                Some(peer) => qemu_img(plan, PEERS[peer].1)?,
            };
            let result = &mut results[index];
            result.seconds.push(took.as_secs_f64());
            result.size_bytes = size_bytes;
            let size = headwater_block::size::format(size_bytes);
            println!(
                "  round {}/{}  {:<26}{:>8.2} s  {size}",
                round + 1,
                plan.rounds,
                result.system,
                took.as_secs_f64()
            );
        }
    }
    Ok(results)
}

/// Starts a daemon on an empty data directory and imports through it, as a user does.
fn ours(plan: &Plan) -> Result<(Duration, u64)> {
    let data_dir = plan.work_dir.join("import");
    std::fs::create_dir_all(&data_dir)?;
    let data_dir = data_dir.canonicalize()?;
    let mut serve = Command::new(&plan.headwater);
    let daemon = Process::start(serve.arg("serve").arg("--data-dir").arg(&data_dir), "headwater serve")?;
    wait_for(&data_dir.join("api.sock"), &daemon)?;
    let start = Instant::now();
    let output = Command::new(&plan.headwater)
        .args(["image", "import"])
        .arg(&plan.image)
        .args(["--name", "measured"])
        .env("HEADWATER_DATA_DIR", &data_dir)
        .output()
        .context("cannot run headwater image import")?;
    let took = start.elapsed();
    if !output.status.success() {
        bail!("headwater image import failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    drop(daemon);
    let size_bytes = tree_bytes(&data_dir.join("store"))?;
    std::fs::remove_dir_all(&data_dir)?;
    Ok((took, size_bytes))
}

fn wait_for(socket: &Path, daemon: &Process) -> Result<()> {
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if start.elapsed() > Duration::from_secs(30) {
            bail!("headwater serve was not ready after 30 s: {}", daemon.last_words());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn qemu_img(plan: &Plan, options: &[&str]) -> Result<(Duration, u64)> {
    let path = plan.work_dir.join("converted.qcow2");
    let start = Instant::now();
    let output = Command::new("qemu-img")
        .args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd"])
        .args(options)
        .arg(&plan.image)
        .arg(&path)
        .output()
        .context("cannot run qemu-img; apt-get install qemu-utils")?;
    let took = start.elapsed();
    if !output.status.success() {
        bail!("qemu-img convert failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let size_bytes = std::fs::metadata(&path)?.len();
    std::fs::remove_file(&path)?;
    Ok((took, size_bytes))
}

/// Bytes of all files below a directory.
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
