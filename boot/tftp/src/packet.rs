//! Parses and writes TFTP packets.

/// The longest request that is accepted.
pub const REQUEST_BYTES_MAX: usize = 1024;

/// The error code that a client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// Not defined; the error text explains it.
    Undefined,
    /// There is no such file.
    NotFound,
    /// The client tried to write.
    AccessViolation,
    /// The packet is not allowed in this state.
    IllegalOperation,
    /// An option is refused. Clients send this code after they only asked for the file's size.
    Refused,
    /// Another code, by its number.
    Other(u16),
}

impl ErrorCode {
    const fn of(number: u16) -> Self {
        match number {
            0 => Self::Undefined,
            1 => Self::NotFound,
            2 => Self::AccessViolation,
            4 => Self::IllegalOperation,
            8 => Self::Refused,
            other => Self::Other(other),
        }
    }

    const fn number(self) -> u16 {
        match self {
            Self::Undefined => 0,
            Self::NotFound => 1,
            Self::AccessViolation => 2,
            Self::IllegalOperation => 4,
            Self::Refused => 8,
            Self::Other(number) => number,
        }
    }
}

/// Why bytes are not a TFTP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Shorter than its type requires.
    #[error("the packet is too short")]
    Short,
    /// The request is longer than [`REQUEST_BYTES_MAX`].
    #[error("the request has {0} bytes; the maximum is {REQUEST_BYTES_MAX}")]
    Long(usize),
    /// A text is not terminated, or is not ASCII.
    #[error("a text in the packet is not terminated, or is not ASCII")]
    Text,
    /// The operation code is unknown.
    #[error("the packet has the unknown operation {0}")]
    Operation(u16),
}

/// A request to read a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The name of the file.
    pub file: String,
    /// The transfer mode; only `octet` is supported.
    pub mode: String,
    /// Options in their original order, with names in lower case.
    pub options: Vec<(String, String)>,
}

impl Request {
    /// The numeric value of an option.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.options.iter().find(|(found, _)| found == name).and_then(|(_, value)| value.parse().ok())
    }
}

/// A TFTP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A client wants to read.
    Read(Request),
    /// A client wants to write.
    Write,
    /// A block of a file.
    Data {
        /// Its number, modulo 65,536.
        block: u16,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// The acknowledgement of a block.
    Ack {
        /// Its number, modulo 65,536.
        block: u16,
    },
    /// The end of the transfer.
    Error {
        /// The reason.
        code: ErrorCode,
        /// The reason, as text for people.
        text: String,
    },
    /// The options that the server accepts (OACK).
    OptionsAccepted(Vec<(String, String)>),
}

impl Packet {
    /// Parses a packet.
    pub fn parse(bytes: &[u8]) -> Result<Self, PacketError> {
        let (operation, rest) = number(bytes)?;
        match operation {
            1 if bytes.len() > REQUEST_BYTES_MAX => Err(PacketError::Long(bytes.len())),
            1 => {
                let mut texts = texts(rest)?.into_iter();
                let mut some = || texts.next().filter(|text| !text.is_empty());
                let (Some(file), Some(mode)) = (some(), some()) else { return Err(PacketError::Short) };
                Ok(Self::Read(Request { file, mode: mode.to_ascii_lowercase(), options: pairs(texts) }))
            }
            2 => Ok(Self::Write),
            3 => number(rest).map(|(block, bytes)| Self::Data { block, bytes: bytes.to_vec() }),
            4 => number(rest).map(|(block, _)| Self::Ack { block }),
            5 => {
                let (code, text) = number(rest)?;
                let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
                Ok(Self::Error {
                    code: ErrorCode::of(code),
                    text: String::from_utf8_lossy(text).into_owned(),
                })
            }
            6 => Ok(Self::OptionsAccepted(pairs(texts(rest)?.into_iter()))),
            other => Err(PacketError::Operation(other)),
        }
    }

    /// Writes the packet.
    pub fn bytes(&self) -> Vec<u8> {
        let (operation, body): (u16, Vec<u8>) = match self {
            Self::Read(request) => {
                let options = request.options.iter().flat_map(|(name, value)| [name, value]);
                (1, joined([&request.file, &request.mode].into_iter().chain(options)))
            }
            Self::Write => (2, Vec::new()),
            Self::Data { block, bytes } => (3, [&block.to_be_bytes()[..], bytes].concat()),
            Self::Ack { block } => (4, block.to_be_bytes().to_vec()),
            Self::Error { code, text } => {
                (5, [&code.number().to_be_bytes()[..], text.as_bytes(), &[0]].concat())
            }
            Self::OptionsAccepted(options) => {
                (6, joined(options.iter().flat_map(|(name, value)| [name, value])))
            }
        };
        [&operation.to_be_bytes()[..], &body].concat()
    }
}

fn number(bytes: &[u8]) -> Result<(u16, &[u8]), PacketError> {
    let (number, rest) = bytes.split_first_chunk().ok_or(PacketError::Short)?;
    Ok((u16::from_be_bytes(*number), rest))
}

fn texts(bytes: &[u8]) -> Result<Vec<String>, PacketError> {
    // Some firmware sends extra zeros after the last text.
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let (all, after) = bytes.split_at_checked(end).ok_or(PacketError::Text)?;
    if all.is_empty() {
        return Ok(Vec::new());
    }
    if after.is_empty() {
        return Err(PacketError::Text);
    }
    let text = |part: &[u8]| {
        let text = std::str::from_utf8(part).ok().filter(|text| text.is_ascii());
        text.map(str::to_owned).ok_or(PacketError::Text)
    };
    all.split(|byte| *byte == 0).map(text).collect()
}

/// Names with their values; a name without a value is dropped.
fn pairs(mut texts: impl Iterator<Item = String>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    while let (Some(name), Some(value)) = (texts.next(), texts.next()) {
        if !name.is_empty() && !value.is_empty() {
            found.push((name.to_ascii_lowercase(), value));
        }
    }
    found
}

fn joined<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<u8> {
    texts.flat_map(|text| text.bytes().chain([0])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_firmware_is_read_with_its_options() {
        let bytes = b"\x00\x01ipxe.efi\0octet\0tsize\x000\0BLKSIZE\x001468\0windowsize\x004\0";
        let Ok(Packet::Read(request)) = Packet::parse(bytes) else { panic!("not a request") };
        assert_eq!((request.file.as_str(), request.mode.as_str()), ("ipxe.efi", "octet"));
        assert_eq!((request.number("blksize"), request.number("tsize")), (Some(1468), Some(0)));
        assert_eq!(request.number("timeout"), None);
    }

    #[test]
    fn each_packet_survives_writing_and_reading() {
        let request = Request {
            file: "a".into(),
            mode: "octet".into(),
            options: vec![("blksize".into(), "1468".into())],
        };
        for packet in [
            Packet::Read(request.clone()),
            Packet::Write,
            Packet::Data { block: 65_535, bytes: vec![1, 2, 0] },
            Packet::Ack { block: 0 },
            Packet::Error { code: ErrorCode::NotFound, text: "no such file".into() },
            Packet::OptionsAccepted(request.options),
        ] {
            assert_eq!(Packet::parse(&packet.bytes()), Ok(packet));
        }
    }

    #[test]
    fn malformed_packets_are_refused_with_a_reason() {
        for (bytes, why) in [
            (&b"\x00"[..], PacketError::Short),
            (b"\x00\x01file\0", PacketError::Short),
            (b"\x00\x01file\0octet", PacketError::Text),
            (b"\x00\x01f\xc3\xa4\0octet\0", PacketError::Text),
            (b"\x00\x04\x00", PacketError::Short),
            (b"\x00\x09", PacketError::Operation(9)),
        ] {
            assert_eq!(Packet::parse(bytes), Err(why), "{bytes:?}");
        }
        let long = [&b"\x00\x01"[..], &[b'x'; 1100], b"\0octet\0"].concat();
        assert_eq!(Packet::parse(&long), Err(PacketError::Long(long.len())));
    }
}
