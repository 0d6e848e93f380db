//! A small fuzzer without coverage. It runs the same changed bytes each time, for some seconds, while real
//! fuzzers run for hours. It also starts from inputs that those fuzzers found to reach new code.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use headwater_block::fuzzing::unpack;

use crate::random::Rng;

/// A fuzz target: its name, the check of bytes, and seed bytes. Crates list them for the fuzzers in `fuzz/`,
/// and the same list is used here.
pub type Target = (&'static str, fn(&[u8]), Vec<Vec<u8>>);

/// Values that break arithmetic.
const ODD: [u64; 8] = [0, 1, 0x7f, 0xff, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX];

/// How long each target runs. There are three dozen, and the fuzzers themselves run for hours.
const TIME: Duration = Duration::from_secs(1);
/// The least number of changed copies of each sample, however slow the machine is.
const LEAST_COPIES: u32 = 2000;
/// Inputs of each target that are not derived from a sample.
const RANDOM_INPUTS: u32 = 200;
/// Their maximal length.
const RANDOM_BYTES: u64 = 600;

/// The file of inputs that `make fuzz-keep` has kept for a target.
fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/kept").join(name)
}

/// Runs each target for a second, one after the other: with its samples, with kept inputs of the fuzzers,
/// with random bytes, and with changed copies of all these. The inputs and their order are the same each
/// time. They always include 2,000 copies of each sample; how many more run depends on the machine. Returns
/// the number of inputs. If an input panics, it is named.
pub fn all(targets: Vec<Target>) -> u64 {
    feed(targets, TIME)
}

fn feed(targets: Vec<Target>, time: Duration) -> u64 {
    let mut fed = 0;
    let mut feed = |name: &'static str, oracle: fn(&[u8]), bytes: &[u8]| {
        let said = Said { name, bytes };
        oracle(bytes);
        drop(said);
        fed += 1;
    };
    for (name, oracle, samples) in targets {
        assert!(!samples.is_empty(), "{name} has nothing to begin with");
        let begin = Instant::now();
        for sample in &samples {
            assert!(!sample.is_empty(), "{name}: a sample is empty");
            feed(name, oracle, sample);
        }
        // A target that was not fuzzed yet has none.
        let file = std::fs::read(kept(name)).unwrap_or_default();
        let found = unpack(&file);
        found.iter().for_each(|input| feed(name, oracle, input));
        let mut rng = Rng::new(0);
        for _ in 0..RANDOM_INPUTS {
            let len = rng.below(RANDOM_BYTES + 1);
            feed(name, oracle, &rng.bytes(usize::try_from(len).unwrap_or(0)));
        }
        for _ in 0..LEAST_COPIES {
            samples.iter().for_each(|sample| feed(name, oracle, &changed(sample, &mut rng)));
        }
        let mut all = samples.iter().map(Vec::as_slice).chain(found.iter().copied()).cycle();
        while begin.elapsed() < time {
            all.by_ref().take(64).for_each(|bytes| feed(name, oracle, &changed(bytes, &mut rng)));
        }
    }
    fed
}

fn changed(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=rng.below(3) {
        change(&mut bytes, rng);
    }
    bytes
}

/// Reports the bytes that made a check panic.
struct Said<'a> {
    name: &'static str,
    bytes: &'a [u8],
}

impl Drop for Said<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let text: String = self.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("{} failed with these {} bytes: {text}", self.name, self.bytes.len());
        }
    }
}

fn index(rng: &mut Rng, below: usize) -> usize {
    usize::try_from(rng.below(below.max(1) as u64)).unwrap_or(0)
}

fn change(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let at = index(rng, bytes.len());
    match rng.below(6) {
        0 => bytes.truncate(at),
        1 => bytes.extend_from_slice(&ODD[index(rng, ODD.len())].to_le_bytes()),
        2 => {
            let end = at + index(rng, bytes.len() - at + 1);
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        3 | 4 => {
            let number = ODD[index(rng, ODD.len())].to_le_bytes();
            let len = if rng.below(2) == 0 { 4 } else { 8 };
            for (byte, new) in bytes.iter_mut().skip(at).zip(&number[..len]) {
                *byte = *new;
            }
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.below(8);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    static FED: AtomicU64 = AtomicU64::new(0);
    static LONGEST: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn kept_fuzzer_inputs_are_found() {
        let file = std::fs::read(kept("scsi_cdb")).unwrap();
        assert!(unpack(&file).len() > 10);
    }

    #[test]
    fn each_target_gets_samples_changed_copies_and_more() {
        fn count(bytes: &[u8]) {
            FED.fetch_add(1, Ordering::Relaxed);
            LONGEST.fetch_max(bytes.len() as u64, Ordering::Relaxed);
        }
        let targets: Vec<Target> =
            vec![("one", count, vec![vec![1; 8], vec![2; 8]]), ("other", count, vec![vec![3; 8]])];
        let fed = feed(targets.clone(), Duration::ZERO);
        assert_eq!(fed, 3 * u64::from(1 + LEAST_COPIES) + 2 * u64::from(RANDOM_INPUTS));
        assert_eq!(FED.load(Ordering::Relaxed), fed);
        assert!(feed(targets, Duration::from_millis(100)) > fed);
        assert!(LONGEST.load(Ordering::Relaxed) > 500);
    }
}
