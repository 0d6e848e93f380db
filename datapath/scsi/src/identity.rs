//! The identity of a logical unit and of an initiator.

/// The properties of a logical unit that INQUIRY and the vital product data report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// T10 vendor identification: at most 8 printable ASCII characters count.
    pub vendor: String,
    /// Product identification: at most 16 printable ASCII characters count.
    pub product: String,
    /// Product revision: at most 4 printable ASCII characters count.
    pub revision: String,
    /// Unit serial number: at most 64 printable ASCII characters count.
    pub serial: String,
    /// A number that no other logical unit has. Multipath and clusters use it as the designator.
    pub uuid: [u8; 16],
}

/// An I_T nexus: an initiator port, and the target port that it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initiator {
    /// The initiator port's TransportID (SPC-4, 7.6.4) as the transport encodes it, a multiple of 4 bytes. It
    /// identifies the initiator for persistent reservations: two sessions of one initiator port give the same
    /// bytes.
    pub transport_id: Box<[u8]>,
    /// Relative target port identifier, from 1.
    pub target_port: u16,
    /// SCSI name string of the target port, for device identification; empty if it has none. If a unit
    /// belongs to several targets, it distinguishes their ports.
    pub target_port_name: String,
}
