//! Decides whether the overflow bypasses the page cache: as configured, or by one measurement when it is
//! opened.
//!
//! Direct I/O needs no memory besides the cache's own, and written data is on the disk. With the page cache,
//! the kernel may be faster on some disks, but uses memory that no budget here counts.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use headwater_block::IoError;
use serde::{Deserialize, Serialize};

use crate::memory::AlignedBuffer;
use crate::units::SEGMENT_BYTES;

/// The kind of I/O of the overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Buffering {
    /// Direct I/O, past the page cache. The open fails if the file system has none.
    #[default]
    Direct,
    /// Through the page cache.
    Buffered,
    /// The kind that a short measurement finds better.
    Auto,
}

impl Buffering {
    /// All kinds, for help texts.
    pub const ALL: [Self; 3] = [Self::Direct, Self::Buffered, Self::Auto];

    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Buffered => "buffered",
            Self::Auto => "auto",
        }
    }
}

impl std::fmt::Display for Buffering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Buffering {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|buffering| buffering.as_str() == text)
            .ok_or_else(|| format!("'{text}' is not a kind of buffering; write direct, buffered or auto"))
    }
}

/// The decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) direct: bool,
    /// Description for people: the kind, and for `auto` the reason.
    pub(super) text: String,
}

/// Opens a file or device for the overflow, with direct I/O or without.
pub(super) type OpenFile<'a> = &'a dyn Fn(bool) -> io::Result<File>;

/// The duration of one measurement; the transfer in progress is finished.
const MEASURE: Duration = Duration::from_millis(50);

/// The most segments that one measurement writes.
const MOST_WRITES: u64 = 4;

/// The page cache must be better by this factor, in percent, because it costs memory.
const BETTER_PERCENT: u64 = 125;

/// Decides for an overflow at `at`; `scratch` opens a file for the measurement.
pub(super) fn choose(wanted: Buffering, at: &Path, scratch: OpenFile<'_>) -> Result<Chosen, IoError> {
    let plain = |direct| Chosen { direct, text: if direct { "direct" } else { "buffered" }.to_owned() };
    if wanted != Buffering::Auto {
        return Ok(plain(wanted == Buffering::Direct));
    }
    let failed = |e: io::Error| {
        IoError::from_os(format!("cannot measure the overflow disk at {}: {e}", at.display()), e)
    };
    let chosen = match scratch(true) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Chosen { direct: false, text: "auto: buffered (the file system has no direct I/O)".to_owned() }
        }
        Err(error) => return Err(failed(error)),
        Ok(file) => {
            let direct = measure(&file).map_err(failed)?;
            // A block device can be open only once at a time.
            drop(file);
            let buffered = scratch(false).and_then(|file| measure(&file)).map_err(failed)?;
            decide(direct, buffered)
        }
    };
    tracing::info!(path = %at.display(), "overflow buffering, {}", chosen.text);
    Ok(chosen)
}

/// The error if direct I/O is required but not available; there is no silent fallback.
pub(super) fn no_direct(at: &Path) -> String {
    format!(
        "the file system of {} has no direct I/O (O_DIRECT): choose another directory, or --buffering buffered",
        at.display()
    )
}

/// Speeds in MiB a second.
#[derive(Clone, Copy, Debug)]
struct Speed {
    write: u64,
    read: u64,
}

fn decide(direct: Speed, buffered: Speed) -> Chosen {
    // Spilled data is written once, and only some of it is read; so the speed of writing decides.
    let is_direct = buffered.write.saturating_mul(100) < direct.write.saturating_mul(BETTER_PERCENT);
    let name = if is_direct { "direct" } else { "buffered" };
    let text = format!(
        "auto: {name} (MiB/s written and read: direct {} and {}, buffered {} and {})",
        direct.write, direct.read, buffered.write, buffered.read
    );
    Chosen { direct: is_direct, text }
}

/// Writes a few segments, each to the disk, and reads them back.
fn measure(file: &File) -> io::Result<Speed> {
    let Some(mut buffer) = AlignedBuffer::new(SEGMENT_BYTES) else {
        return Err(io::ErrorKind::OutOfMemory.into());
    };
    // Not zeroes, which some file systems do not store.
    let mut state = 1u32;
    for byte in buffer.iter_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = state.to_be_bytes()[0];
    }
    let mut done = 0;
    let write = timed(|| {
        file.write_all_at(&buffer, done * SEGMENT_BYTES as u64)?;
        file.sync_data()?;
        done += 1;
        Ok(done < MOST_WRITES)
    })?;
    let mut read_back = 0;
    let read = timed(|| {
        file.read_exact_at(&mut buffer, read_back * SEGMENT_BYTES as u64)?;
        read_back += 1;
        Ok(read_back < done)
    })?;
    Ok(Speed { write, read })
}

/// Runs a step of one segment repeatedly, until it returns that it was the last or the time is over. Returns
/// MiB a second.
fn timed(mut step: impl FnMut() -> io::Result<bool>) -> io::Result<u64> {
    let start = Instant::now();
    let mut bytes = 0u64;
    loop {
        let more = step()?;
        bytes += SEGMENT_BYTES as u64;
        if !more || start.elapsed() >= MEASURE {
            break;
        }
    }
    let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
    Ok((bytes.saturating_mul(1_000_000) / us) >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(write: u64) -> Speed {
        Speed { write, read: 1000 }
    }

    #[test]
    fn the_page_cache_has_to_be_clearly_better() {
        assert!(decide(speed(800), speed(900)).direct);
        assert!(!decide(speed(800), speed(1000)).direct);
        let text = decide(speed(40), speed(500)).text;
        assert_eq!(
            text,
            "auto: buffered (MiB/s written and read: direct 40 and 1000, buffered 500 and 1000)"
        );
    }

    #[test]
    fn what_is_told_is_not_measured() {
        let never = |_: bool| -> io::Result<File> { panic!("it was opened") };
        let at = Path::new("/x");
        assert!(choose(Buffering::Direct, at, &never).unwrap().direct);
        assert!(!choose(Buffering::Buffered, at, &never).unwrap().direct);
    }

    #[test]
    fn auto_measures_and_says_what_it_found() {
        let open = |_: bool| tempfile::tempfile();
        let text = choose(Buffering::Auto, Path::new("/x"), &open).unwrap().text;
        assert!(text.starts_with("auto: ") && text.contains("MiB/s written"), "{text}");
        let none = |direct: bool| {
            if direct { Err(io::ErrorKind::InvalidInput.into()) } else { tempfile::tempfile() }
        };
        let chosen = choose(Buffering::Auto, Path::new("/x"), &none).unwrap();
        assert!(!chosen.direct && chosen.text.contains("no direct I/O"));
        let full = |_: bool| -> io::Result<File> { Err(io::ErrorKind::PermissionDenied.into()) };
        assert!(choose(Buffering::Auto, Path::new("/x"), &full).unwrap_err().to_string().contains("/x"));
    }

    #[test]
    fn auto_opens_a_device_once_at_a_time() {
        let device = tempfile::NamedTempFile::new().unwrap();
        // Like `O_EXCL` for a block device.
        let exclusive = |_: bool| {
            let file = File::options().read(true).write(true).open(device.path())?;
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
            Ok(file)
        };
        let text = choose(Buffering::Auto, Path::new("/x"), &exclusive).unwrap().text;
        assert!(text.contains("MiB/s written"), "{text}");
    }

    #[test]
    fn names_are_parsed() {
        for buffering in Buffering::ALL {
            assert_eq!(buffering.as_str().parse(), Ok(buffering));
        }
        assert!("on".parse::<Buffering>().unwrap_err().contains("direct, buffered or auto"));
    }
}
