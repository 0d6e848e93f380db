//! Generic netlink, with which the kernel's NBD client is controlled: encoding, decoding, and one socket.
#![expect(unsafe_code, reason = "rustix does not know generic netlink")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

const NETLINK_GENERIC: i32 = 16;
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;

/// Size of a netlink header and of a generic one.
const HEADERS_BYTES: usize = 16 + 4;

/// The attributes of a message, one after the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let len = u16::try_from(value.len().saturating_add(4)).unwrap_or(u16::MAX);
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(super) fn nested(self, kind: u16, inner: &Attributes) -> Self {
        self.bytes(kind | NLA_F_NESTED, &inner.0)
    }
}

fn message(family: u16, command: u8, attributes: &Attributes) -> Vec<u8> {
    let len = u32::try_from(HEADERS_BYTES.saturating_add(attributes.0.len())).unwrap_or(u32::MAX);
    let mut out = Vec::new();
    out.extend(len.to_ne_bytes());
    out.extend(family.to_ne_bytes());
    out.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    // Sequence number and port are 0: the socket has one request at a time.
    out.extend([0; 8]);
    out.extend([command, 1, 0, 0]);
    out.extend(&attributes.0);
    out
}

/// One message of an answer.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    /// The end: 0 for success, or the negated errno.
    Done(i32),
    /// Attributes.
    Attributes(&'a [u8]),
}

/// The messages of a datagram.
fn parts(mut bytes: &[u8]) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    while let (Some(len), Some(kind)) = (field(bytes, 0).map(u32::from_ne_bytes), field(bytes, 4)) {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let Some(one) = bytes.get(..len).filter(|one| one.len() >= 16) else { break };
        if u16::from_ne_bytes(kind) == NLMSG_ERROR {
            parts.push(Part::Done(field(one, 16).map_or(0, i32::from_ne_bytes)));
        } else {
            parts.push(Part::Attributes(one.get(HEADERS_BYTES..).unwrap_or_default()));
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    parts
}

/// The value of an attribute.
pub(super) fn find(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16::from_ne_bytes(field(attributes, 0)?));
        let kind = u16::from_ne_bytes(field(attributes, 2)?);
        let value = attributes.get(4..len)?;
        if kind & !NLA_F_NESTED == wanted {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
}

fn field<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<[u8; BYTES]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// A socket, and the number of the generic netlink family `nbd`.
pub(super) struct Netlink {
    socket: OwnedFd,
    family: u16,
}

impl Netlink {
    pub(super) fn open() -> std::io::Result<Self> {
        // SAFETY: plain integers; the result is checked.
        let socket =
            unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, NETLINK_GENERIC) };
        if socket < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let mut netlink = Self { socket, family: GENL_ID_CTRL };
        let name = Attributes::default().bytes(CTRL_ATTR_FAMILY_NAME, b"nbd\0");
        let answer = netlink.ask(CTRL_CMD_GETFAMILY, &name)?;
        let family = find(&answer, CTRL_ATTR_FAMILY_ID).and_then(|value| field(value, 0));
        netlink.family = family.map(u16::from_ne_bytes).ok_or(Errno::NOENT)?;
        Ok(netlink)
    }

    /// Sends a command and waits for its answer. Returns the answer's attributes, which may be empty.
    pub(super) fn ask(&self, command: u8, attributes: &Attributes) -> std::io::Result<Vec<u8>> {
        let message = message(self.family, command, attributes);
        // SAFETY: the pointer and the length are those of one vector; an unconnected netlink socket sends to the kernel.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
        if sent < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut answer = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let len = match rustix::io::read(&self.socket, &mut buffer) {
                Ok(len) => len,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for part in parts(buffer.get(..len).unwrap_or_default()) {
                match part {
                    Part::Done(0) => return Ok(answer),
                    Part::Done(error) => return Err(Errno::from_raw_os_error(error.saturating_neg()).into()),
                    Part::Attributes(attributes) => answer = attributes.to_vec(),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_padded_and_found_again() {
        let inner = Attributes::default().u32(1, 7);
        let attributes = Attributes::default().bytes(2, b"nbd\0x").u64(3, 9).nested(7, &inner);
        let bytes = message(0x10, 3, &attributes);
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(field(&bytes, 0).map(u32::from_ne_bytes), Some(u32::try_from(bytes.len()).unwrap()));
        let parsed = parts(&bytes);
        let [Part::Attributes(found)] = parsed.as_slice() else { panic!("{parsed:?}") };
        assert_eq!(find(found, 2), Some(&b"nbd\0x"[..]));
        assert_eq!(find(found, 3), Some(&9_u64.to_ne_bytes()[..]));
        assert_eq!(find(find(found, 7).unwrap(), 1), Some(&7_u32.to_ne_bytes()[..]));
        assert_eq!(find(found, 8), None);
        let mut error = vec![0; 36];
        error[0] = 36;
        error[4] = 2;
        error[16..20].copy_from_slice(&(-16_i32).to_ne_bytes());
        assert_eq!(parts(&error), [Part::Done(-16)]);
        for len in 0..bytes.len() {
            parts(&bytes[..len]);
        }
    }
}
