//! Decides how a boot server answers a DHCP packet. Pure: the input is the packet, what is known of its machine
//! ([`Past`] from [`crate::history`]), and the boot server's address.
//!
//! An answer has one of two forms. *Direct*: it names the boot file. *BINL* (Boot Information Negotiation Layer): it
//! only announces the boot server; the firmware then asks port 4011, and the second answer names the boot file. Some
//! firmware ignores BINL.
//!
//! ```text
//!   option 60 PXEClient or HTTPClient?       if not: no answer, it is no network boot
//!   a registered machine?                    if not: no answer, another boot server may own it
//!   user-class iPXE, option 175 says http -> URL of its script
//!   loads loaders and never a script      -> no answer for some minutes
//!   user-class iPXE without http          -> our iPXE, by TFTP
//!   architecture 16                       -> the URL of the loader for UEFI; option 60 HTTPClient
//!   architecture 0                        -> undionly.kpxe; option 43 {6:8}: direct form
//!   architectures 7, 9                    -> shim or iPXE; no option 43: BINL form
//!     repeats its DISCOVER                -> the same in the direct form, for firmware that ignores BINL
//! ```

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::history::Past;
use crate::mac::Mac;
use crate::packet::{MessageType, Packet, option};

/// The port at which clients listen.
const CLIENT_PORT: u16 = 68;
/// The vendor class (option 60) of firmware that boots from URLs, and of answers to it.
const HTTP_CLIENT: &[u8] = b"HTTPClient";
/// The port at which servers and relays listen.
const SERVER_PORT: u16 = 67;
/// iPXE's own options (175): no proxy DHCP server will answer, so iPXE does not wait for one.
const IPXE_NO_PROXY: [u8; 3] = [0xb0, 1, 1];
/// Option 43: PXE_DISCOVERY_CONTROL (6), one byte, 8: use the boot file of this offer and look for no other server.
const NO_DISCOVERY: [u8; 4] = [6, 1, 8, 255];
/// iPXE's own options (175): it can fetch files over HTTP.
const IPXE_HTTP: u8 = 0x13;

/// The port at which a packet arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// 67.
    Dhcp,
    /// 4011, at which the boot server answers firmware that got an offer in BINL form.
    BootServer,
}

/// The architecture of a client (option 93). The option may list several values; the first that is known counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// A PC with BIOS.
    Bios,
    /// 64-bit UEFI on x86.
    EfiX64,
    /// 64-bit UEFI that boots from a URL.
    EfiX64Http,
    /// Another architecture, by its number.
    Other(u16),
}

/// The form of an offer; see the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Without option 43: the firmware asks port 4011 next.
    Binl,
    /// With option 43 {6:8}: the firmware takes the file named in the offer.
    Direct,
}

/// The file that an answer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loader {
    /// iPXE for BIOS.
    Bios,
    /// The loader for 64-bit UEFI.
    EfiX64,
    /// The loader for 64-bit UEFI, by HTTP.
    EfiX64Http,
    /// The machine's script, for a client that already runs iPXE.
    Script,
}

/// Why a packet gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The packet does not come from firmware or a loader that looks for a boot server.
    NotForUs,
    /// No machine with this hardware address is registered.
    Unknown,
    /// There is no loader for this architecture, given by its number.
    Architecture(u16),
    /// The machine loads loader after loader and never fetches its script.
    Looping,
}

/// The boot server's address and file names, as answers contain them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its address in the clients' network.
    pub address: Ipv4Addr,
    /// The port of its HTTP server.
    pub http_port: u16,
    /// The name of iPXE for BIOS on its TFTP server.
    pub bios_loader: String,
    /// The name of the loader for UEFI on its TFTP server, and below `/l/` on its HTTP server.
    pub efi_loader: String,
}

impl Server {
    /// The URL of a machine's script.
    pub fn script_url(&self, mac: Mac) -> String {
        format!("http://{}:{}/b/{}/boot.ipxe", self.address, self.http_port, mac.dashed())
    }

    /// The URL of the loader for UEFI.
    pub fn loader_url(&self) -> String {
        format!("http://{}:{}/l/{}", self.address, self.http_port, self.efi_loader)
    }

    /// The name or URL of a loader.
    fn file(&self, loader: Loader, mac: Mac) -> Vec<u8> {
        match loader {
            Loader::Bios => self.bios_loader.clone(),
            Loader::EfiX64 => self.efi_loader.clone(),
            Loader::EfiX64Http => self.loader_url(),
            Loader::Script => self.script_url(mac),
        }
        .into_bytes()
    }
}

/// An answer to a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The packet to send.
    pub packet: Packet,
    /// Its destination. `None`: the address that the request came from.
    pub to: Option<SocketAddrV4>,
    /// The loader that the answer names.
    pub loader: Loader,
    /// The form of the answer.
    pub form: Form,
}

/// The decision about a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet is answered.
    Answer(Box<Answer>),
    /// The packet gets no answer.
    Silent(Reason),
}

/// Whether the packet comes from firmware or a loader that looks for a boot server. The machine is looked up only if
/// so.
pub fn is_asked(asked: &Packet, port: Port) -> bool {
    let is_question = match (port, asked.message_type()) {
        (Port::Dhcp, Some(MessageType::Discover)) => true,
        (Port::BootServer, Some(MessageType::Request | MessageType::Inform)) => true,
        (Port::Dhcp | Port::BootServer, _) => false,
    };
    is_question && is_firmware(asked)
}

/// Whether the packet comes from firmware or a loader.
pub fn is_firmware(asked: &Packet) -> bool {
    !asked.is_reply && (has_class(asked, b"PXEClient") || has_class(asked, HTTP_CLIENT))
}

fn has_class(asked: &Packet, class: &[u8]) -> bool {
    asked.option(option::VENDOR_CLASS).unwrap_or_default().starts_with(class)
}

/// Decides on the answer to a packet if another DHCP server gives the addresses (proxy DHCP).
pub fn decide(asked: &Packet, port: Port, is_known: bool, past: Past, server: &Server) -> Verdict {
    if !is_asked(asked, port) {
        return Verdict::Silent(Reason::NotForUs);
    }
    match choose(asked, is_known, past) {
        Ok((loader, form)) => answer(asked, port, loader, form, server),
        Err(reason) => Verdict::Silent(reason),
    }
}

/// The loader for a client, and the form of the offer. `Err`: the client gets no loader.
pub fn choose(asked: &Packet, is_known: bool, past: Past) -> Result<(Loader, Form), Reason> {
    if !is_known {
        return Err(Reason::Unknown);
    }
    let (arch, runs) = (arch(asked), ipxe(asked));
    if runs == Some(Ipxe::WithHttp) {
        return Ok((Loader::Script, Form::Direct));
    }
    if past.is_looping {
        return Err(Reason::Looping);
    }
    match arch {
        Arch::Bios => Ok((Loader::Bios, Form::Direct)),
        Arch::EfiX64Http => Ok((Loader::EfiX64Http, Form::Direct)),
        Arch::EfiX64 => {
            // iPXE accepts a boot file in any form of answer.
            let is_direct = past.takes_other_form || runs.is_some();
            Ok((Loader::EfiX64, if is_direct { Form::Direct } else { Form::Binl }))
        }
        Arch::Other(number) => Err(Reason::Architecture(number)),
    }
}

/// Adds the boot file to an answer that also gives the client its address (full DHCP).
#[must_use]
pub fn with_loader(mut packet: Packet, asked: &Packet, loader: Loader, server: &Server) -> Packet {
    packet.siaddr = server.address;
    packet.file = server.file(loader, asked.mac);
    if loader == Loader::EfiX64Http {
        return packet.with(option::VENDOR_CLASS, HTTP_CLIENT);
    }
    // With no class and no option 43, this is the answer of an ordinary DHCP server: all firmware takes its boot
    // file.
    if ipxe(asked).is_some() { packet.with(option::IPXE, IPXE_NO_PROXY) } else { packet }
}

/// The capability of the iPXE that runs on the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ipxe {
    WithHttp,
    WithoutHttp,
}

/// The user-class alone does not prove iPXE; option 175 is specific to iPXE.
fn ipxe(asked: &Packet) -> Option<Ipxe> {
    let class = asked.option(option::USER_CLASS)?;
    let own = asked.option(option::IPXE)?;
    if !class.windows(4).any(|part| part == b"iPXE") {
        return None;
    }
    let mut rest = own;
    while let [code, len, tail @ ..] = rest {
        if *code == IPXE_HTTP {
            return Some(Ipxe::WithHttp);
        }
        rest = tail.get(usize::from(*len)..).unwrap_or_default();
    }
    Some(Ipxe::WithoutHttp)
}

fn arch(asked: &Packet) -> Arch {
    let values = asked.option(option::ARCHITECTURE).unwrap_or_default().chunks_exact(2);
    let mut values = values.filter_map(|pair| pair.try_into().ok().map(u16::from_be_bytes)).peekable();
    let Some(&first) = values.peek() else { return arch_of_class(asked) };
    let known =
        values.find_map(|number| Some(arch_of(number)).filter(|arch| !matches!(arch, Arch::Other(_))));
    known.unwrap_or(Arch::Other(first))
}

/// Numbers 7 and 9 both mean 64-bit UEFI, because an early draft swapped them.
const fn arch_of(number: u16) -> Arch {
    match number {
        0 => Arch::Bios,
        7 | 9 => Arch::EfiX64,
        16 => Arch::EfiX64Http,
        other => Arch::Other(other),
    }
}

/// Firmware without option 93 names its architecture in the vendor class: `PXEClient:Arch:00000:UNDI:002001`.
fn arch_of_class(asked: &Packet) -> Arch {
    let class = asked.option(option::VENDOR_CLASS).unwrap_or_default();
    let digits = class.strip_prefix(b"PXEClient:Arch:").or(class.strip_prefix(b"HTTPClient:Arch:"));
    let digits = digits.and_then(|rest| rest.get(..5));
    let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    number.map_or(Arch::Bios, arch_of)
}

fn answer(asked: &Packet, port: Port, loader: Loader, form: Form, server: &Server) -> Verdict {
    let message = match port {
        Port::Dhcp => MessageType::Offer,
        Port::BootServer => MessageType::Ack,
    };
    let mut packet = Packet::reply_to(asked, message);
    packet.siaddr = server.address;
    // In the header too, because some loaders read only the header.
    packet.file = server.file(loader, asked.mac);
    let class = if loader == Loader::EfiX64Http { HTTP_CLIENT } else { b"PXEClient" };
    let mut packet =
        packet.with(option::SERVER_ID, server.address.octets()).with(option::VENDOR_CLASS, class);
    // Firmware compares the identifier with its own.
    if let Some(id) = asked.option(option::MACHINE_ID) {
        packet = packet.with(option::MACHINE_ID, id);
    }
    if form == Form::Direct && matches!(loader, Loader::Bios | Loader::EfiX64) {
        packet = packet.with(option::VENDOR, NO_DISCOVERY);
    }
    let to = (port == Port::Dhcp).then(|| destination(asked));
    Verdict::Answer(Box::new(Answer { to, packet: packet.with_relay_of(asked), loader, form }))
}

/// The destination of an answer: the relay, or the client's address if it has one, or broadcast.
pub(crate) fn destination(asked: &Packet) -> SocketAddrV4 {
    if !asked.giaddr.is_unspecified() {
        SocketAddrV4::new(asked.giaddr, SERVER_PORT)
    } else if !asked.ciaddr.is_unspecified() {
        SocketAddrV4::new(asked.ciaddr, CLIENT_PORT)
    } else {
        // Broadcast, even if the client does not ask for that: the kernel cannot reach a client without an address.
        SocketAddrV4::new(Ipv4Addr::BROADCAST, CLIENT_PORT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);

    fn server() -> Server {
        Server {
            address: Ipv4Addr::new(10, 0, 0, 2),
            http_port: 8069,
            bios_loader: "undionly.kpxe".into(),
            efi_loader: "ipxe.efi".into(),
        }
    }

    /// Firmware that looks for a server, with these values of option 93.
    fn firmware(message: MessageType, archs: &[u16]) -> Packet {
        let archs: Vec<u8> = archs.iter().flat_map(|arch| arch.to_be_bytes()).collect();
        let packet = Packet::of_client(9, MAC, message)
            .with(option::VENDOR_CLASS, *b"PXEClient:Arch:00007:UNDI:003000");
        if archs.is_empty() { packet } else { packet.with(option::ARCHITECTURE, archs) }
    }

    fn running_ipxe(archs: &[u16], features: &[u8]) -> Packet {
        let own: Vec<u8> = features.iter().flat_map(|code| [*code, 1, 1]).collect();
        firmware(MessageType::Discover, archs).with(option::USER_CLASS, *b"iPXE").with(option::IPXE, own)
    }

    fn given(verdict: Verdict) -> Result<(Loader, Form, String), Reason> {
        match verdict {
            Verdict::Answer(answer) => {
                Ok((answer.loader, answer.form, String::from_utf8(answer.packet.file).unwrap()))
            }
            Verdict::Silent(reason) => Err(reason),
        }
    }

    #[test]
    fn each_kind_of_client_gets_its_answer() {
        use Reason::{Architecture, Looping, NotForUs, Unknown};
        let fresh = Past::default();
        let ignored = Past { repeats: 1, takes_other_form: true, ..fresh };
        let loops = Past { is_looping: true, ..fresh };
        let discover = |archs: &[u16]| firmware(MessageType::Discover, archs);
        let url = "http://10.0.0.2:8069/b/52-54-00-01-02-03/boot.ipxe".to_owned();
        let bios = Ok((Loader::Bios, Form::Direct, "undionly.kpxe".to_owned()));
        let efi = |form| Ok((Loader::EfiX64, form, "ipxe.efi".to_owned()));
        let http = Ok((Loader::EfiX64Http, Form::Direct, "http://10.0.0.2:8069/l/ipxe.efi".to_owned()));
        let script = Ok((Loader::Script, Form::Direct, url));
        let plain = Packet::of_client(9, MAC, MessageType::Discover);
        let http_firmware = plain.clone().with(option::VENDOR_CLASS, *b"HTTPClient:Arch:00016");
        let from_server = Packet { is_reply: true, ..discover(&[0]) };
        let of_class = plain.clone().with(option::VENDOR_CLASS, *b"PXEClient:Arch:00009:UNDI:003000");
        let old = plain.clone().with(option::VENDOR_CLASS, *b"PXEClient");
        let only_class = discover(&[0]).with(option::USER_CLASS, *b"iPXE");
        let table = [
            ("BIOS", discover(&[0]), true, fresh, bios.clone()),
            ("UEFI as 7", discover(&[7]), true, fresh, efi(Form::Binl)),
            ("UEFI as 9", discover(&[9]), true, fresh, efi(Form::Binl)),
            ("UEFI among others", discover(&[6, 7]), true, fresh, efi(Form::Binl)),
            ("UEFI by its class", of_class, true, fresh, efi(Form::Binl)),
            ("no architecture at all", old, true, fresh, bios.clone()),
            ("UEFI that ignores BINL", discover(&[7]), true, ignored, efi(Form::Direct)),
            ("BIOS that asks again", discover(&[0]), true, ignored, bios.clone()),
            ("iPXE on BIOS", running_ipxe(&[0], &[0x21, 0x13]), true, fresh, script.clone()),
            ("iPXE on UEFI", running_ipxe(&[7], &[0x13]), true, loops, script),
            ("old iPXE", running_ipxe(&[0], &[0x21]), true, fresh, bios.clone()),
            ("old iPXE on UEFI", running_ipxe(&[7], &[0x21]), true, fresh, efi(Form::Direct)),
            ("another user-class iPXE", only_class, true, fresh, bios),
            ("a loop", discover(&[0]), true, loops, Err(Looping)),
            ("ARM", discover(&[11]), true, fresh, Err(Architecture(11))),
            ("unknown machine", discover(&[0]), false, fresh, Err(Unknown)),
            ("unknown iPXE", running_ipxe(&[0], &[0x13]), false, fresh, Err(Unknown)),
            ("no firmware", plain, true, fresh, Err(NotForUs)),
            ("HTTP boot", http_firmware.clone(), true, fresh, http),
            ("HTTP boot that loops", http_firmware, true, loops, Err(Looping)),
            ("a server's packet", from_server, true, fresh, Err(NotForUs)),
            (
                "a request to the site's DHCP",
                firmware(MessageType::Request, &[0]),
                true,
                fresh,
                Err(NotForUs),
            ),
        ];
        for (name, packet, is_known, past, expected) in table {
            assert_eq!(given(decide(&packet, Port::Dhcp, is_known, past, &server())), expected, "{name}");
        }
    }

    #[test]
    fn the_boot_server_port_confirms_and_answers_where_the_question_came_from() {
        let asked = firmware(MessageType::Request, &[7]);
        let Verdict::Answer(answer) = decide(&asked, Port::BootServer, true, Past::default(), &server())
        else {
            panic!("there is no answer");
        };
        assert_eq!((answer.packet.message_type(), answer.to), (Some(MessageType::Ack), None));
        let discover = firmware(MessageType::Discover, &[7]);
        let silent = decide(&discover, Port::BootServer, true, Past::default(), &server());
        assert_eq!(silent, Verdict::Silent(Reason::NotForUs));
    }

    #[test]
    fn an_offer_gives_no_address_and_names_the_server_in_its_header() {
        let asked = firmware(MessageType::Discover, &[0]).with(option::MACHINE_ID, [0; 17]);
        let Verdict::Answer(answer) = decide(&asked, Port::Dhcp, true, Past::default(), &server()) else {
            panic!("there is no answer");
        };
        let packet = Packet::parse(&answer.packet.bytes()).unwrap();
        assert_eq!((packet.yiaddr, packet.siaddr), (Ipv4Addr::UNSPECIFIED, server().address));
        assert_eq!(packet.address(option::SERVER_ID), Some(server().address));
        assert_eq!(packet.option(option::VENDOR_CLASS), Some(&b"PXEClient"[..]));
        assert_eq!(packet.option(option::VENDOR), Some(&NO_DISCOVERY[..]));
        assert_eq!(packet.option(option::MACHINE_ID), Some(&[0; 17][..]));
        assert_eq!((packet.xid, packet.is_reply), (9, true));
    }

    #[test]
    fn an_answer_with_an_address_names_the_loader_as_plain_dhcp_does() {
        let told = |asked: &Packet, loader| {
            let packet = Packet::reply_to(asked, MessageType::Offer);
            with_loader(packet, asked, loader, &server())
        };
        let bios = told(&firmware(MessageType::Discover, &[0]), Loader::Bios);
        assert_eq!((bios.siaddr, bios.file.as_slice()), (server().address, &b"undionly.kpxe"[..]));
        assert_eq!((bios.option(option::VENDOR), bios.option(option::VENDOR_CLASS)), (None, None));
        let http = told(&firmware(MessageType::Discover, &[16]), Loader::EfiX64Http);
        assert_eq!(http.option(option::VENDOR_CLASS), Some(&b"HTTPClient"[..]));
        // iPXE waits for no proxy.
        let ipxe = told(&running_ipxe(&[0], &[0x13]), Loader::Script);
        assert_eq!(ipxe.option(option::IPXE), Some(&[0xb0, 1, 1][..]));
    }

    #[test]
    fn an_offer_without_option_43_asks_for_a_request_to_4011() {
        let asked = firmware(MessageType::Discover, &[7]);
        let Verdict::Answer(answer) = decide(&asked, Port::Dhcp, true, Past::default(), &server()) else {
            panic!("there is no answer");
        };
        assert_eq!(answer.packet.option(option::VENDOR), None);
    }

    #[test]
    fn a_relay_gets_the_answer_at_its_own_address() {
        let asked = firmware(MessageType::Discover, &[0]);
        let to = |asked: &Packet| match decide(asked, Port::Dhcp, true, Past::default(), &server()) {
            Verdict::Answer(answer) => answer.to.map(|to| to.to_string()),
            Verdict::Silent(_) => None,
        };
        assert_eq!(to(&asked).as_deref(), Some("255.255.255.255:68"));
        let relayed = Packet { giaddr: Ipv4Addr::new(10, 9, 0, 1), ..asked.clone() };
        assert_eq!(to(&relayed).as_deref(), Some("10.9.0.1:67"));
        let with_address = Packet { ciaddr: Ipv4Addr::new(10, 0, 0, 77), ..asked };
        assert_eq!(to(&with_address).as_deref(), Some("10.0.0.77:68"));
    }
}
