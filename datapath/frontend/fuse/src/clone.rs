//! Gives a mounted connection a further queue, so that each thread has its own: the ioctl
//! `FUSE_DEV_IOC_CLONE`.
#![expect(unsafe_code, reason = "the kernel offers this as an ioctl only, and ioctls are unsafe to call")]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

/// `_IOR(229, 0, uint32_t)` of `linux/fuse.h`; despite its direction, the kernel reads a descriptor number
/// from it.
const FUSE_DEV_IOC_CLONE: Opcode = opcode::read::<u32>(229, 0);

/// Opens `/dev/fuse`.
pub(crate) fn open_device() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Another descriptor of the connection of `session`. An answer must go to the descriptor from which its
/// request came.
pub(crate) fn clone_device(session: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let device = open_device()?;
    let number = u32::try_from(session.as_raw_fd()).map_err(|_| rustix::io::Errno::BADF)?;
    // SAFETY: the kernel reads four bytes at the pointer, which `Setter` makes point to a `u32` of its own that lives
    // until the call returns; nothing is written through it.
    unsafe { ioctl(&device, Setter::<FUSE_DEV_IOC_CLONE, u32>::new(number)) }?;
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_number_is_that_of_the_header() {
        assert_eq!(FUSE_DEV_IOC_CLONE, 0x8004_e500);
    }
}
