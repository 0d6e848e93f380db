//! The names of the volumes of an LVM physical volume.

use crate::{Bytes, Fault};

/// The volumes of this group, as `group/volume`.
pub(crate) fn volumes(_bytes: &mut Bytes) -> Result<Vec<String>, Fault> {
    Ok(Vec::new())
}
