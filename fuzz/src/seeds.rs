//! Writes the bytes that fuzzing begins with: `seeds DIR` makes `DIR/TARGET/sample-N`, and prints the targets.

use std::path::Path;

// What the code that counts coverage calls, here too.
use libfuzzer_sys as _;

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).unwrap_or_else(|| "corpus".to_owned());
    let targets = [
        headwater_fuse::fuzzing::targets(),
        headwater_image::fuzzing::targets(),
        headwater_iscsi::fuzzing::targets(),
        headwater_nbd::fuzzing::targets(),
        headwater_remote::fuzzing::targets(),
        headwater_scsi::fuzzing::targets(),
        headwater_store::fuzzing::targets(),
        headwater_store_server::fuzzing::targets(),
        headwater_vhost_user::fuzzing::targets(),
        headwater_writecache::fuzzing::targets(),
    ];
    for (name, _, samples) in targets.into_iter().flatten() {
        let dir = Path::new(&dir).join(name);
        std::fs::create_dir_all(&dir)?;
        for (number, sample) in samples.iter().enumerate() {
            std::fs::write(dir.join(format!("sample-{number}")), sample)?;
        }
        println!("{name}");
    }
    Ok(())
}
