//! Limits for a walk of a file system: number of entries, memory, depth, and length of paths. The bytes are those of an image, which
//! anybody may have made. With these limits, a walk ends even if directories contain themselves.
//!
//! [`Visits`] counts the entries that a walk visits and the memory of its directory lists. Callers compare the depth with [`DEPTH_MAX`]
//! themselves, and call [`Visits::cut`] if they skip something. A caller that walks recursively notes [`Visits::held_bytes`] before it lists
//! a directory, and calls [`Visits::release_to`] with this number when it drops that list.

use crate::{Fault, Node, fault};

/// The most entries of one file system that are visited.
pub const ENTRIES_MAX: u64 = 20_000_000;
/// The most memory for all directory lists that a walk holds at a time: one list for each level. A comparison of two versions walks both at
/// once, and has one limit for both.
pub const LISTS_BYTES_MAX: usize = 256 << 20;
/// The most levels of directories that a walk descends.
pub const DEPTH_MAX: usize = 256;
/// The most bytes of a path of an entry that is visited. Linux accepts no longer paths.
pub const PATH_BYTES_MAX: usize = 4096;
/// The memory of an entry of a list, without its name and path. The tables of a map may be half empty.
const ENTRY_BYTES: usize = 2 * (size_of::<Node>() + size_of::<Vec<u8>>());

/// Counts the entries that are visited and the memory of their lists, and ends the visit if it was cancelled.
pub struct Visits {
    entries_max: u64,
    left: u64,
    /// The memory of the lists that are held now.
    held_bytes: usize,
    /// The limit that was reached.
    over: Option<Fault>,
    /// Whether something was skipped because it lies too deep or its path is too long.
    is_cut: bool,
    is_cancelled: Box<dyn Fn() -> bool + Send>,
}

impl Visits {
    /// The limits of a walk of a whole file system, which ends early if `is_cancelled` says so.
    pub fn new(is_cancelled: impl Fn() -> bool + Send + 'static) -> Self {
        Self::of(ENTRIES_MAX, is_cancelled)
    }

    /// The same for a walk of at most this number of entries.
    pub fn of(entries_max: u64, is_cancelled: impl Fn() -> bool + Send + 'static) -> Self {
        let is_cancelled = Box::new(is_cancelled);
        Self { entries_max, left: entries_max, held_bytes: 0, over: None, is_cut: false, is_cancelled }
    }

    /// Counts one entry. Fails if there are too many entries, or if the walk was cancelled.
    pub fn add(&mut self) -> Result<(), Fault> {
        if self.left == 0 {
            let entries_max = self.entries_max;
            self.over = Some(fault(format!(
                "it has more than {entries_max} entries, or directories that contain themselves (a loop)"
            )));
        }
        self.left = self.left.saturating_sub(1);
        self.check()
    }

    /// Counts the memory of an entry of this name in the list of its directory. `false`: its path is too long, so it must be left out of the
    /// list.
    pub fn hold(&mut self, directory: &Node, name: &[u8]) -> Result<bool, Fault> {
        let path_bytes = directory.path.len() + 1 + name.len();
        if path_bytes > PATH_BYTES_MAX {
            self.cut();
            return Ok(false);
        }
        self.held_bytes += ENTRY_BYTES + name.len() + path_bytes;
        if self.held_bytes > LISTS_BYTES_MAX {
            let why = fault(format!(
                "lists of its directories take more than {} MiB, or directories contain themselves",
                LISTS_BYTES_MAX >> 20
            ));
            self.over = Some(why.clone());
            return Err(why);
        }
        Ok(true)
    }

    /// The memory of the lists that are held now.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Notes that lists were dropped, and that the other lists have this number of bytes.
    pub fn release_to(&mut self, held_bytes: usize) {
        self.held_bytes = held_bytes;
    }

    /// Notes that something was skipped because it lies too deep or its path is too long.
    pub fn cut(&mut self) {
        self.is_cut = true;
    }

    /// The remark for people if something was skipped.
    pub fn remark(&self) -> Option<String> {
        self.is_cut.then(|| {
            format!(
                "entries that lie deeper than {DEPTH_MAX} directories, or have a path of more than \
                 {PATH_BYTES_MAX} bytes, were skipped"
            )
        })
    }

    /// Fails if the whole walk must end, and not only the listing of one directory: a limit was reached, or the walk was cancelled.
    pub fn check(&self) -> Result<(), Fault> {
        if (self.is_cancelled)() {
            return Err(fault("the operation was cancelled"));
        }
        self.over.clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_lists_has_a_limit_and_is_given_back() {
        let mut visits = Visits::new(|| false);
        let (root, name) = (Node::root(0), [b'n'; 4000]);
        assert!(visits.hold(&root, &name).unwrap());
        let one_bytes = visits.held_bytes();
        assert!(one_bytes >= size_of::<Node>() + 8000);
        let most = LISTS_BYTES_MAX / one_bytes;
        for _ in 0..2 * most {
            visits.release_to(0);
            assert!(visits.hold(&root, &name).unwrap());
        }
        for _ in 1..most {
            assert!(visits.hold(&root, &name).unwrap());
        }
        let refused = visits.hold(&root, &name).unwrap_err();
        assert!(refused.to_string().contains("more than 256 MiB"), "{refused}");
        // For good: what was being listed is not whole.
        visits.release_to(0);
        assert_eq!((visits.check(), visits.add()), (Err(refused.clone()), Err(refused)));
    }

    #[test]
    fn a_path_that_is_too_long_is_left_out_with_a_remark() {
        let mut visits = Visits::new(|| false);
        let directory = Node { path: vec![b'/'; 4000], ..Node::root(0) };
        assert!(visits.hold(&directory, &[b'n'; 95]).unwrap());
        assert_eq!(visits.remark(), None);
        let held_bytes = visits.held_bytes();
        assert!(!visits.hold(&directory, &[b'n'; 96]).unwrap());
        assert_eq!(visits.held_bytes(), held_bytes);
        assert!(visits.remark().unwrap().contains("more than 4096 bytes"));
    }
}
