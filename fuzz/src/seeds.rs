//! Writes the bytes that fuzzing begins with: `seeds DIR` makes `DIR/TARGET/sample-N`, and prints the targets.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).unwrap_or_else(|| "corpus".to_owned());
    let targets = headwater_store::fuzzing::targets().into_iter().chain(headwater_image::fuzzing::targets());
    for (name, _, samples) in targets {
        let dir = Path::new(&dir).join(name);
        std::fs::create_dir_all(&dir)?;
        for (number, sample) in samples.iter().enumerate() {
            std::fs::write(dir.join(format!("sample-{number}")), sample)?;
        }
        println!("{name}");
    }
    Ok(())
}
