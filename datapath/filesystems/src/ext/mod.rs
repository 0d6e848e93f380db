//! ext2, ext3 and ext4.

use crate::{Bytes, Entries, Fault, FileSystem, Kind, Node, Scanned, Visits, fault};

/// An ext file system.
pub struct Ext {
    kind: Kind,
}

impl Ext {
    /// Opens one.
    pub fn open(_bytes: Bytes) -> Result<Self, Fault> {
        Ok(Self { kind: Kind::Ext4 })
    }
}

impl FileSystem for Ext {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn root(&self) -> Node {
        Node::root(2)
    }

    fn list(&mut self, _: &Node, _: &mut Visits) -> Result<Entries, Fault> {
        Err(fault("not yet"))
    }

    fn read(&mut self, _: &Node, _: u64, _: &mut [u8]) -> Result<usize, Fault> {
        Err(fault("not yet"))
    }

    fn scan(&mut self, _: &mut Visits, _: &mut dyn FnMut(Scanned) -> Result<(), Fault>) -> Result<(), Fault> {
        Err(fault("not yet"))
    }
}
