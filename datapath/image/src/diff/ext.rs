//! ext2, ext3 and ext4, read by a crate made for that. It takes as much memory as the file system says that it needs, and
//! memory that is not to be had ends the program, which nothing catches: so that is looked at here before.

use ext4_view::{Ext4, Ext4Read, FileType, Metadata, PathBuf};

use crate::diff::tree::{Bytes, Entries, Fault, Kind, NONE, Node, Tree, Visits, fault};

/// The largest blocks that Linux reads have 64 KiB: 2 to the power of 10 and so many.
const LOG_BLOCK_BYTES_MAX: u32 = 6;

/// Most groups of blocks: with the usual 128 MiB each, 512 TiB.
const GROUPS_MAX: u64 = 1 << 22;

/// What each has at this place of its superblock.
const MAGIC_AT: usize = 0x38;
const MAGIC: [u8; 2] = [0x53, 0xef];

/// The longest target of a symbolic link: it lies in one block.
const LINK_BYTES_MAX: u64 = 64 << 10;

/// An ext file system.
pub(super) struct Ext {
    fs: Ext4,
    /// The file that was read last.
    open: Option<(Vec<u8>, ext4_view::File)>,
}

impl Ext4Read for Bytes {
    fn read(
        &mut self,
        start_byte: u64,
        into: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync + 'static>> {
        Bytes::read(self, start_byte, into).map_err(|fault| fault.0.into())
    }
}

impl Ext {
    pub(super) fn open(mut bytes: Bytes) -> Result<Self, Fault> {
        check_superblock(&mut bytes)?;
        let fs = Ext4::load(Box::new(bytes)).map_err(fault)?;
        Ok(Self { fs, open: None })
    }
}

/// Refuses what is no such file system, and what would take more memory than any file system needs.
fn check_superblock(bytes: &mut Bytes) -> Result<(), Fault> {
    let mut block = [0; 1024];
    bytes.read(1024, &mut block)?;
    if block.get(MAGIC_AT..MAGIC_AT + 2) != Some(&MAGIC) {
        return Err(fault(NONE));
    }
    let word = |at: usize| {
        let field = block.get(at..at + 4).and_then(|field| field.try_into().ok());
        field.map_or(0, u32::from_le_bytes)
    };
    let log_block_bytes = word(0x18);
    if log_block_bytes > LOG_BLOCK_BYTES_MAX {
        return Err(fault(format!("its blocks have 2^{} bytes", u64::from(log_block_bytes) + 10)));
    }
    let blocks = u64::from(word(0x150)) << 32 | u64::from(word(0x4));
    let groups = blocks.div_ceil(u64::from(word(0x20)).max(1));
    if groups > GROUPS_MAX {
        return Err(fault(format!("it has {groups} groups of blocks")));
    }
    Ok(())
}

fn path_of(path: &[u8]) -> Result<PathBuf, Fault> {
    PathBuf::try_from(path).map_err(fault)
}

fn node(path: Vec<u8>, metadata: &Metadata) -> Node {
    let kind = match metadata.file_type() {
        FileType::Directory => Kind::Directory,
        FileType::Regular => Kind::File,
        FileType::Symlink => Kind::Link,
        _ => Kind::Other,
    };
    let owner = u128::from(metadata.uid()) << 32 | u128::from(metadata.gid());
    let modified = metadata.modified();
    Node {
        path,
        kind,
        size_bytes: metadata.len(),
        modified: u128::from(modified.seconds().cast_unsigned()) << 32 | u128::from(modified.nanoseconds()),
        attributes: owner << 32 | u128::from(metadata.mode()),
        place: 0,
        fault: None,
    }
}

impl Tree for Ext {
    fn root(&self) -> Node {
        Node::root(0)
    }

    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault> {
        let mut out = Entries::new();
        for entry in self.fs.read_dir(&path_of(&directory.path)?).map_err(fault)? {
            let entry = entry.map_err(fault)?;
            visits.add()?;
            let name = entry.file_name().as_ref().to_vec();
            if name != b"." && name != b".." && visits.hold(directory, &name)? {
                // By its inode: a look-up by path reads the directories above anew for each entry.
                let path = directory.child(&name);
                let found = match entry.metadata() {
                    Ok(metadata) => node(path, &metadata),
                    Err(why) => Node::unreadable(path, fault(why)),
                };
                out.insert(name, found);
            }
        }
        Ok(out)
    }

    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let open = match &mut self.open {
            Some((path, open)) if *path == file.path => open,
            _ => {
                let open = self.fs.open(&path_of(&file.path)?).map_err(fault)?;
                &mut self.open.insert((file.path.clone(), open)).1
            }
        };
        if open.position() != at {
            open.seek_to(at).map_err(fault)?;
        }
        let mut have = 0;
        while let Some(rest) = into.get_mut(have..).filter(|rest| !rest.is_empty()) {
            match open.read_bytes(rest).map_err(fault)? {
                0 => break,
                len => have += len,
            }
        }
        Ok(have)
    }

    fn link(&mut self, link: &Node) -> Result<Vec<u8>, Fault> {
        if link.size_bytes > LINK_BYTES_MAX {
            return Err(fault(format!("a symbolic link has {} bytes", link.size_bytes)));
        }
        let target = self.fs.read_link(&path_of(&link.path)?).map_err(fault)?;
        Ok(target.as_ref().to_vec())
    }
}
