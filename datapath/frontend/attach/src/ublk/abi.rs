//! The kernel's ublk interface as bytes: commands, device information, parameters. No descriptors, no rings.
//!
//! Numbers are in the host's byte order. Names and layouts are those of `linux/ublk_cmd.h`.

use headwater_block::Geometry;

/// Size of `struct ublksrv_ctrl_dev_info`.
pub(super) const INFO_BYTES: usize = 64;
/// Size of `struct ublk_params` up to the end of its discard part, padded.
pub(super) const PARAMS_BYTES: usize = 64;
/// Size of `struct ublksrv_io_desc`.
pub(super) const DESCRIPTOR_BYTES: usize = 24;
/// Descriptors that the kernel reserves for each queue in its mapping.
pub(super) const MAX_QUEUE_DEPTH: u64 = 4096;

const fn command(direction: u32, number: u32, bytes: u32) -> u32 {
    direction << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const BOTH: u32 = 3;

pub(super) const GET_DEV_INFO: u32 = command(READ, 0x02, 32);
pub(super) const ADD_DEV: u32 = command(BOTH, 0x04, 32);
pub(super) const DEL_DEV: u32 = command(BOTH, 0x05, 32);
pub(super) const START_DEV: u32 = command(BOTH, 0x06, 32);
pub(super) const STOP_DEV: u32 = command(BOTH, 0x07, 32);
pub(super) const SET_PARAMS: u32 = command(BOTH, 0x08, 32);
pub(super) const START_USER_RECOVERY: u32 = command(BOTH, 0x10, 32);
pub(super) const END_USER_RECOVERY: u32 = command(BOTH, 0x11, 32);
pub(super) const DEL_DEV_ASYNC: u32 = command(READ, 0x14, 32);
pub(super) const FETCH_REQ: u32 = command(BOTH, 0x20, 16);
pub(super) const COMMIT_AND_FETCH_REQ: u32 = command(BOTH, 0x21, 16);

/// If its server dies, the device waits for another one instead of ending.
pub(super) const F_USER_RECOVERY: u64 = 1 << 3;
/// Requests that the dead server had taken are sent again to the next one.
pub(super) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
pub(super) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;

/// `UBLK_IO_RES_ABORT`: the device is being removed.
pub(super) const RESULT_ABORT: i32 = -19;

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It has no server and cannot get another one.
    Dead,
    Live,
    /// It waits for a new server.
    Quiesced,
    Other(u16),
}

/// Information about a device: `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Info {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) max_io_bytes: u32,
    pub(super) device: u32,
    pub(super) pid: i32,
    pub(super) flags: u64,
    /// Number of the server's choice: the mark of the process that made the device.
    pub(super) server_flags: u64,
}

impl Info {
    pub(super) fn encode(&self) -> [u8; INFO_BYTES] {
        let mut out = [0; INFO_BYTES];
        let bytes = (self.queues.to_ne_bytes().into_iter())
            .chain(self.depth.to_ne_bytes())
            .chain(self.state.to_ne_bytes())
            .chain([0, 0])
            .chain(self.max_io_bytes.to_ne_bytes())
            .chain(self.device.to_ne_bytes())
            .chain(self.pid.to_ne_bytes())
            .chain([0; 4])
            .chain(self.flags.to_ne_bytes())
            .chain(self.server_flags.to_ne_bytes());
        out.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        out
    }

    pub(super) fn decode(bytes: &[u8; INFO_BYTES]) -> Self {
        Self {
            queues: u16_at(bytes, 0),
            depth: u16_at(bytes, 2),
            state: u16_at(bytes, 4),
            max_io_bytes: u32_at(bytes, 8),
            device: u32_at(bytes, 12),
            pid: u32_at(bytes, 16).cast_signed(),
            flags: u64_at(bytes, 24),
            server_flags: u64_at(bytes, 32),
        }
    }

    pub(super) fn state(&self) -> State {
        match self.state {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            other => State::Other(other),
        }
    }
}

/// `struct ublksrv_ctrl_cmd`, as the 80 bytes of a command.
pub(super) fn control_command(device: u32, address: u64, len: u16, data: u64) -> [u8; 80] {
    let mut out = [0; 80];
    let bytes = (device.to_ne_bytes().into_iter())
        .chain(u16::MAX.to_ne_bytes())
        .chain(len.to_ne_bytes())
        .chain(address.to_ne_bytes())
        .chain(data.to_ne_bytes());
    out.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    out
}

/// `struct ublksrv_io_cmd`, as the 80 bytes of a command.
pub(super) fn io_command(queue: u16, tag: u16, result: i32, address: u64) -> [u8; 80] {
    let mut out = [0; 80];
    let bytes = (queue.to_ne_bytes().into_iter())
        .chain(tag.to_ne_bytes())
        .chain(result.to_ne_bytes())
        .chain(address.to_ne_bytes());
    out.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    out
}

/// `struct ublk_params`: sizes, cache, discard.
pub(super) fn parameters(geometry: &Geometry, max_io_bytes: u32) -> [u8; PARAMS_BYTES] {
    const READ_ONLY: u32 = 1;
    const VOLATILE_CACHE: u32 = 1 << 2;
    const FUA: u32 = 1 << 3;
    const BASIC_AND_DISCARD: u32 = 3;
    /// 1 GiB, in sectors of 512 bytes.
    const CLEARED_SECTORS: u32 = 1 << 21;
    let mut attributes = 0;
    if geometry.read_only {
        attributes |= READ_ONLY;
    }
    if geometry.volatile_cache {
        attributes |= VOLATILE_CACHE | FUA;
    }
    let shift = |bytes: u32| u8::try_from(bytes.max(512).trailing_zeros()).unwrap_or(12);
    let (logical, physical) = (shift(geometry.logical_block_bytes), shift(geometry.physical_block_bytes));
    let cleared = if geometry.read_only { 0 } else { CLEARED_SECTORS };
    let mut out = [0; PARAMS_BYTES];
    let bytes = (60_u32.to_ne_bytes().into_iter())
        .chain(BASIC_AND_DISCARD.to_ne_bytes())
        .chain(attributes.to_ne_bytes())
        .chain([logical, physical, physical, physical])
        .chain((max_io_bytes / 512).to_ne_bytes())
        .chain(0_u32.to_ne_bytes())
        .chain((geometry.size_bytes / 512).to_ne_bytes())
        .chain(0_u64.to_ne_bytes())
        .chain(0_u32.to_ne_bytes())
        .chain(geometry.physical_block_bytes.to_ne_bytes())
        .chain(cleared.to_ne_bytes())
        .chain(cleared.to_ne_bytes())
        .chain(1_u16.to_ne_bytes());
    out.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    out
}

/// A request of the kernel: `struct ublksrv_io_desc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) operation: Operation,
    pub(super) fua: bool,
    pub(super) may_unmap: bool,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
}

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Unknown(u8),
}

impl Descriptor {
    pub(super) fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Self {
        let flags = u32_at(bytes, 0);
        let operation = match u8::try_from(flags & 0xff).unwrap_or(u8::MAX) {
            0 => Operation::Read,
            1 => Operation::Write,
            2 => Operation::Flush,
            3 => Operation::Discard,
            5 => Operation::WriteZeroes,
            other => Operation::Unknown(other),
        };
        Self {
            operation,
            fua: flags & 1 << 13 != 0,
            may_unmap: flags & 1 << 15 == 0,
            len_bytes: u64::from(u32_at(bytes, 4)) << 9,
            offset_bytes: u64_at(bytes, 8) << 9,
        }
    }
}

fn field<const BYTES: usize>(bytes: &[u8], at: usize) -> [u8; BYTES] {
    bytes.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; BYTES])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(field(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(field(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(field(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_numbers_are_those_of_the_header() {
        assert_eq!(ADD_DEV, 0xc020_7504);
        assert_eq!(GET_DEV_INFO, 0x8020_7502);
        assert_eq!(DEL_DEV_ASYNC, 0x8020_7514);
        assert_eq!(FETCH_REQ, 0xc010_7520);
        assert_eq!(COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn information_survives_encoding() {
        let info = Info {
            queues: 2,
            depth: 64,
            state: 2,
            max_io_bytes: 1 << 20,
            device: 7,
            pid: -5,
            flags: F_USER_RECOVERY | F_CMD_IOCTL_ENCODE,
            server_flags: 0x6865_6164_7761_7472,
        };
        assert_eq!(Info::decode(&info.encode()), info);
        assert_eq!(info.state(), State::Quiesced);
    }

    #[test]
    fn descriptors_and_parameters_have_the_layout_of_the_header() {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..4].copy_from_slice(&(5_u32 | 1 << 13 | 1 << 15).to_ne_bytes());
        bytes[4..8].copy_from_slice(&8_u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&16_u64.to_ne_bytes());
        let expected = Descriptor {
            operation: Operation::WriteZeroes,
            fua: true,
            may_unmap: false,
            offset_bytes: 8192,
            len_bytes: 4096,
        };
        assert_eq!(Descriptor::decode(&bytes), expected);
        let geometry = Geometry {
            size_bytes: 1 << 30,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: true,
        };
        let bytes = parameters(&geometry, 256 << 10);
        assert_eq!(u32_at(&bytes, 8), 12, "cache and FUA");
        assert_eq!(bytes[12..16], [9, 12, 12, 12]);
        assert_eq!((u32_at(&bytes, 16), u64_at(&bytes, 24)), (512, 1 << 21));
        assert_eq!((u32_at(&bytes, 44), u32_at(&bytes, 48), u16_at(&bytes, 56)), (4096, 1 << 21, 1));
        let durable = Geometry { volatile_cache: false, ..geometry };
        assert_eq!(u32_at(&parameters(&durable, 256 << 10), 8), 0, "nothing to flush");
    }

    #[test]
    fn a_disk_with_large_sectors_keeps_them() {
        let geometry = Geometry {
            size_bytes: 1 << 30,
            logical_block_bytes: 4096,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: true,
        };
        let bytes = parameters(&geometry, 256 << 10);
        assert_eq!(bytes[12..16], [12; 4], "shifts of logical, physical, optimal and smallest requests");
        // The driver counts these in sectors of 512 bytes, whatever the logical block size is.
        assert_eq!((u32_at(&bytes, 16), u64_at(&bytes, 24)), (512, 1 << 21));
    }
}
