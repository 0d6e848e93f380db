//! Brings the bytes that fuzzing begins with, and keeps what it found.
//!
//! `seeds DIR KEPT` makes `DIR/TARGET/sample-N` of the samples that crates list and `DIR/TARGET/kept-N` of the inputs in the file
//! `KEPT/TARGET`, and prints the targets. `seeds pack DIR FILE` makes such a file of the inputs in `DIR`, the shortest first.

use std::fs;
use std::io::{Error, Result};
use std::path::Path;

use headwater_block::fuzzing::{pack, unpack};
// What the code that counts coverage calls, here too.
use libfuzzer_sys as _;

/// A file of kept inputs is no longer than this: what is longest is left out.
const MOST_KEPT_BYTES: usize = 512 << 10;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["pack", dir, file] => keep(Path::new(dir), Path::new(file)),
        [dir, kept] => begin(Path::new(dir), Path::new(kept)),
        _ => Err(Error::other("usage: seeds DIR KEPT | seeds pack DIR FILE")),
    }
}

fn begin(dir: &Path, kept: &Path) -> Result<()> {
    let targets = [
        headwater_filesystems::fuzzing::targets(),
        headwater_boot_script::fuzzing::targets(),
        headwater_dhcp::fuzzing::targets(),
        headwater_fuse::fuzzing::targets(),
        headwater_image::fuzzing::targets(),
        headwater_iscsi::fuzzing::targets(),
        headwater_nbd::fuzzing::targets(),
        headwater_remote::fuzzing::targets(),
        headwater_scsi::fuzzing::targets(),
        headwater_store::fuzzing::targets(),
        headwater_store_server::fuzzing::targets(),
        headwater_tftp::fuzzing::targets(),
        headwater_vhost_user::fuzzing::targets(),
        headwater_writecache::fuzzing::targets(),
    ];
    for (name, _, samples) in targets.into_iter().flatten() {
        let dir = dir.join(name);
        fs::create_dir_all(&dir)?;
        for (number, sample) in samples.iter().enumerate() {
            fs::write(dir.join(format!("sample-{number}")), sample)?;
        }
        // A target that was not fuzzed yet has none.
        let file = fs::read(kept.join(name)).unwrap_or_default();
        for (number, input) in unpack(&file).into_iter().enumerate() {
            fs::write(dir.join(format!("kept-{number}")), input)?;
        }
        println!("{name}");
    }
    Ok(())
}

fn keep(dir: &Path, file: &Path) -> Result<()> {
    let mut inputs = Vec::new();
    for entry in fs::read_dir(dir)? {
        inputs.push(fs::read(entry?.path())?);
    }
    // The same file for the same inputs.
    inputs.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    let mut bytes = 0;
    let fits = inputs.iter().take_while(|input| {
        bytes += 4 + input.len();
        bytes <= MOST_KEPT_BYTES
    });
    fs::write(file, pack(fits.map(Vec::as_slice)))
}
