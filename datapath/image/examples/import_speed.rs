//! Imports an image file into a new store, and prints how long that took and how much space it takes.
//!
//! The comparison is `qemu-img convert -c -o compression_type=zstd` on the same file.
//!
//! `cargo run --release -p headwater-image --example import_speed -- FILE STORE_DIR [LEVEL] [THREADS]`

use std::path::Path;
use std::time::Instant;

use headwater_image::{Cancel, ImportOptions, import, open_source, verify};
use headwater_store::{Access, LocalDir};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, dir, rest @ ..] = arguments.as_slice() else {
        return Err("usage: import_speed FILE STORE_DIR [LEVEL] [THREADS]".into());
    };
    let store = LocalDir::open(Path::new(dir), Access::WRITE)?;
    let mut options = ImportOptions::new("image".parse()?, 0);
    if let Some(level) = rest.first() {
        options.level = level.parse()?;
    }
    options.threads = rest.get(1).map(|threads| threads.parse()).transpose()?;

    let started = Instant::now();
    let done = import(open_source(Path::new(file), None)?, &store, &options, &mut |_| {})?;
    let import_s = started.elapsed().as_secs_f64();
    println!(
        "import: {import_s:.2} s, {} MiB of data, {} MiB of it shared, {} bytes stored, {} in objects",
        done.data_bytes >> 20,
        done.shared_bytes >> 20,
        done.version.stored_bytes,
        done.version.objects.len()
    );
    let started = Instant::now();
    let verified = verify(&store, done.version.manifest, &Cancel::new(), &mut |_| {})?;
    println!(
        "verify: {:.2} s, {}",
        started.elapsed().as_secs_f64(),
        if verified.is_sound() { "sound" } else { "damaged" }
    );
    Ok(())
}
