//! An empty disk of any size, which reads as zeroes: the base of machines that start with an empty disk,
//! and of tests.

use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};

use crate::error::{ImageError, ImageErrorKind};
use crate::fetch_pool::read_only;
use crate::manifest::IMAGE_MAX_BYTES;
use crate::reader::read_only_geometry;

/// Creates a read-only disk of `size_bytes` zeroes. The size must be a multiple of 512.
pub fn null_device(size_bytes: u64) -> Result<Arc<dyn Device>, ImageError> {
    let why = if size_bytes == 0 {
        "a size of 0".to_owned()
    } else if !size_bytes.is_multiple_of(512) {
        format!("{size_bytes} bytes, which is not a multiple of 512")
    } else if size_bytes > IMAGE_MAX_BYTES {
        format!("{size_bytes} bytes, and the maximum is {IMAGE_MAX_BYTES}")
    } else {
        return Ok(Arc::new(NullDevice { size_bytes }));
    };
    Err(ImageError::new(ImageErrorKind::Invalid, format!("an empty disk cannot have {why}")))
}

struct NullDevice {
    size_bytes: u64,
}

impl Device for NullDevice {
    fn geometry(&self) -> Geometry {
        read_only_geometry(self.size_bytes)
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { into, .. } => into.fill(0),
            Op::Flush => {}
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => return Err(read_only()),
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { mut buffer, .. } => {
                buffer.fill(0);
                done.complete(Ok(()), buffer);
            }
            Request::Prefetch { .. } | Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headwater_block::{IoErrorKind, blocking};

    #[test]
    fn it_is_empty_and_stays_so() {
        let disk = null_device(1 << 20).unwrap();
        let mut bytes = vec![7; 4096];
        blocking::read(disk.as_ref(), 512, &mut bytes).unwrap();
        assert_eq!(bytes, vec![0; 4096]);
        assert_eq!(blocking::write(disk.as_ref(), 0, &bytes).unwrap_err().kind(), IoErrorKind::ReadOnly);
        let extents = disk.extents(ByteRange::new(0, 1 << 20).unwrap(), 8).unwrap();
        assert_eq!(extents, [Extent { len: 1 << 20, kind: ExtentKind::Hole }]);
    }

    #[test]
    fn odd_sizes_are_refused() {
        for size in [0, 1000, IMAGE_MAX_BYTES + 512] {
            assert!(null_device(size).is_err(), "{size}");
        }
    }
}
