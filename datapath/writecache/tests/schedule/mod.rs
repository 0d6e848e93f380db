//! What the explored threads do, the disk under them, and who says whether a read was right.

pub mod client;
pub mod disk;
pub mod oracle;
