//! Collects the names of all files of a file system, and makes the path of any file from them. The `id` of a file is the
//! number of its inode or record.

use crate::units::{u64_of, usize_of_u32};
use crate::visits::{DEPTH_MAX, PATH_BYTES_MAX};
use crate::{Fault, fault};

/// A name of a file.
#[derive(Clone, Copy, Debug)]
struct Name {
    id: u64,
    parent: u64,
    /// Its place in the text of all names, which has less than 4 GiB.
    at: u32,
    len: u16,
}

/// The names that a scan found.
#[derive(Debug, Default)]
pub struct Names {
    /// After [`Names::sort`]: by id and then in the order in which they were found.
    names: Vec<Name>,
    text: Vec<u8>,
    root: u64,
}

impl Names {
    /// No names yet. The root has none.
    pub fn new(root: u64) -> Self {
        Self { root, ..Self::default() }
    }

    /// Adds a name of a file in a directory.
    pub fn add(&mut self, id: u64, parent: u64, name: &[u8]) -> Result<(), Fault> {
        let (at, len) = (u32::try_from(self.text.len()), u16::try_from(name.len()));
        let (Ok(at), Ok(len)) = (at, len) else { return Err(fault("the names of its files are too long")) };
        self.text.extend(name);
        self.names.push(Name { id, parent, at, len });
        Ok(())
    }

    /// Must be called after the last name was added, and before the first question.
    pub fn sort(&mut self) {
        self.names.sort_by_key(|name| name.id);
    }

    /// The memory that they take. Vectors may be half empty while they grow.
    pub fn memory_bytes(&self) -> usize {
        self.names.len().saturating_mul(size_of::<Name>()).saturating_add(self.text.len())
    }

    /// How many names there are.
    pub fn count(&self) -> u64 {
        u64_of(self.names.len())
    }

    /// The name of a file that was found first.
    fn name_of(&self, id: u64) -> Option<Name> {
        let first = self.names.partition_point(|name| name.id < id);
        self.names.get(first).copied().filter(|name| name.id == id)
    }

    /// The directories of a file, from the directory that has its first name up to the root. Empty if they do not lead to
    /// the root within [`DEPTH_MAX`], for example because a directory contains itself.
    pub fn directories(&self, id: u64) -> Vec<u64> {
        let parent = |id: u64| if id == self.root { None } else { self.name_of(id).map(|name| name.parent) };
        let chain: Vec<u64> = std::iter::successors(parent(id), |id| parent(*id)).take(DEPTH_MAX).collect();
        if chain.last() == Some(&self.root) { chain } else { Vec::new() }
    }

    /// A path of a file, with its name that was found first. `None`: the file or one of its directories has no name, or
    /// the path is longer than [`DEPTH_MAX`] or [`PATH_BYTES_MAX`], for example because a directory contains itself.
    pub fn path(&self, id: u64) -> Option<Vec<u8>> {
        let mut parts = Vec::new();
        let (mut at, mut len) = (id, 0);
        while at != self.root {
            let name = self.name_of(at)?;
            let start = usize_of_u32(name.at);
            let part = self.text.get(start..start.checked_add(name.len.into())?)?;
            len += part.len() + 1;
            if parts.len() >= DEPTH_MAX || len > PATH_BYTES_MAX {
                return None;
            }
            parts.push(part);
            at = name.parent;
        }
        let joined: Vec<u8> = parts.iter().rev().flat_map(|part| [b"/", *part].concat()).collect();
        Some(if joined.is_empty() { b"/".to_vec() } else { joined })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_do_not_lead_to_the_root_are_none() {
        let mut names = Names::new(2);
        for (id, parent) in [(10, 2), (11, 10), (12, 11)] {
            names.add(id, parent, b"whole").unwrap();
        }
        // Each of two directories contains the other.
        for (id, parent) in [(20, 21), (21, 20), (22, 21)] {
            names.add(id, parent, b"loop").unwrap();
        }
        names.add(31, 30, b"lost").unwrap();
        for depth in 1..=DEPTH_MAX as u64 {
            names.add(1000 + depth, if depth == 1 { 2 } else { 999 + depth }, b"deep").unwrap();
        }
        names.add(5000, 1000 + DEPTH_MAX as u64, b"deeper").unwrap();
        names.sort();
        assert_eq!(names.directories(12), [11, 10, 2]);
        assert_eq!(names.directories(1000 + DEPTH_MAX as u64).len(), DEPTH_MAX);
        for id in [2, 20, 22, 31, 99, 5000] {
            assert_eq!(names.directories(id), [0_u64; 0], "{id}");
        }
    }
}
