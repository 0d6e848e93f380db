//! The limits of a visit of a file system: how many entries, how much memory, how deep, how long the paths.
//!
//! The bytes are those of an image, which anybody may have made. With these limits, a visit of directories that contain
//! themselves ends.

use crate::{Fault, Node, fault};

/// The most entries of one file system that are visited.
pub const ENTRIES_MAX: u64 = 20_000_000;
/// The most memory for lists of directories, of all that are held at a time: one for each level, of both versions.
pub const LISTS_BYTES_MAX: usize = 256 << 20;
/// The deepest directory that is looked into.
pub const DEPTH_MAX: usize = 256;
/// The longest path that is looked at. Linux takes no longer one.
pub const PATH_BYTES_MAX: usize = 4096;
/// What an entry of a list takes beside its name and path. The tables of a map may be half empty.
const ENTRY_BYTES: usize = 2 * (size_of::<Node>() + size_of::<Vec<u8>>());

/// Counts the entries that are visited and the memory of their lists, and ends the visit if it was cancelled.
pub struct Visits {
    left: u64,
    /// What the lists take that are held now.
    held_bytes: usize,
    /// The limit that was reached.
    over: Option<Fault>,
    /// Whether something lies too deep to be looked into.
    is_cut: bool,
    is_cancelled: Box<dyn Fn() -> bool + Send>,
}

impl Visits {
    /// The limits of a whole visit, which ends early if `is_cancelled` says so.
    pub fn new(is_cancelled: impl Fn() -> bool + Send + 'static) -> Self {
        Self::of(ENTRIES_MAX, is_cancelled)
    }

    /// The same for at most so many entries.
    pub fn of(entries: u64, is_cancelled: impl Fn() -> bool + Send + 'static) -> Self {
        let is_cancelled = Box::new(is_cancelled);
        Self { left: entries, held_bytes: 0, over: None, is_cut: false, is_cancelled }
    }

    /// Counts one entry; a fault if these are too many, or if the visit was cancelled.
    pub fn add(&mut self) -> Result<(), Fault> {
        if self.left == 0 {
            self.over = Some(fault(format!(
                "it has more than {ENTRIES_MAX} entries, or directories that contain themselves (a loop)"
            )));
        }
        self.left = self.left.saturating_sub(1);
        self.check()
    }

    /// Counts what an entry of this name takes in the list of its directory. `false`: its path is too long for a list.
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

    /// What the lists take that are held now.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Gives back the memory of lists that are gone: so many bytes are still held.
    pub fn release_to(&mut self, held_bytes: usize) {
        self.held_bytes = held_bytes;
    }

    /// Notes that something is left out because it lies too deep.
    pub fn cut(&mut self) {
        self.is_cut = true;
    }

    /// What to say if something was left out.
    pub fn remark(&self) -> Option<String> {
        self.is_cut.then(|| {
            format!(
                "what lies deeper than {DEPTH_MAX} directories, or has a path of more than \
                 {PATH_BYTES_MAX} bytes, was not looked into"
            )
        })
    }

    /// The fault that ends the visit as a whole, and not only that of one directory.
    pub fn check(&self) -> Result<(), Fault> {
        if (self.is_cancelled)() {
            return Err(fault("the visit was cancelled"));
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
