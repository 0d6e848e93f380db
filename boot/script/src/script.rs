//! The iPXE script of one machine.
//!
//! A script is read line by line, words are split at blanks, `${name}` is replaced, and `||`, `&&`, quotation marks and `\` mean
//! something. So a value is written only if all of its characters are plain.

use std::net::Ipv4Addr;

/// The longest options of the kernel; x86 takes 2,048 bytes, and the loader adds some.
pub const OPTIONS_BYTES_MAX: usize = 1800;
/// How long a machine waits before it tries again, in seconds.
pub(crate) const RETRY_S: u32 = 5;

/// Why a script cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    /// A character that means something to iPXE, or that is not to be seen.
    #[error("{what} has the character '{}', which cannot stand in a boot script", .character.escape_debug())]
    Character {
        /// Which value.
        what: &'static str,
        /// The character.
        character: char,
    },
    /// More than a kernel takes.
    #[error("the kernel's options have {0} bytes; at most {OPTIONS_BYTES_MAX} can be given")]
    Long(usize),
}

/// What a machine boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The machine's name.
    pub machine: String,
    /// What it boots, for people.
    pub version: String,
    /// The boot server.
    pub server: Ipv4Addr,
    /// The port of its HTTP server.
    pub port: u16,
    /// Path of this script there.
    pub script: String,
    /// Path of the kernel.
    pub kernel: String,
    /// Path of its initramfs.
    pub initrd: String,
    /// Path of the machine's settings.
    pub settings: String,
    /// The kernel's options, of the image.
    pub options: String,
}

/// The script that boots a machine. When something fails, the machine asks for its script again.
pub fn script(boot: &Boot) -> Result<String, ScriptError> {
    let machine = word("the name of the machine", &boot.machine)?;
    let version = word("the name of the version", &boot.version)?;
    let base = format!("http://{}:{}", boot.server, boot.port);
    let again = word("the path of the script", &boot.script)?;
    let kernel = word("the path of the kernel", &boot.kernel)?;
    let initrd = word("the path of the initramfs", &boot.initrd)?;
    let settings = word("the path of the settings", &boot.settings)?;
    let options = check_options(&boot.options)?;
    Ok(format!(
        "#!ipxe\n\
         echo headwater: {machine} boots {version}\n\
         imgfree\n\
         kernel --name kernel {base}{kernel} initrd=initrd initrd=settings {options} || goto failed\n\
         initrd --name initrd {base}{initrd} || goto failed\n\
         initrd --name settings {base}{settings} || goto failed\n\
         boot || goto failed\n\
         {}",
        again_after(&format!("{machine} could not be booted"), &base, &again)
    ))
}

/// The script of a machine that cannot boot as things are: it says why, and asks again.
pub fn refusal(
    machine: &str,
    why: &str,
    server: Ipv4Addr,
    port: u16,
    path: &str,
) -> Result<String, ScriptError> {
    let machine = word("the name of the machine", machine)?;
    let path = word("the path of the script", path)?;
    let base = format!("http://{server}:{port}");
    Ok(format!(
        "#!ipxe\n\
         echo headwater: {machine}: {}\n\
         {}",
        plain(why),
        again_after(&format!("{machine} does not boot"), &base, &path)
    ))
}

fn again_after(what: &str, base: &str, path: &str) -> String {
    format!(
        ":failed\n\
         echo headwater: {what}, trying again in {RETRY_S} s\n\
         sleep {RETRY_S}\n\
         chain --replace {base}{path} || goto failed\n"
    )
}

/// Options of a kernel that can stand in a script: words of plain characters, with single blanks in between.
pub fn check_options(options: &str) -> Result<String, ScriptError> {
    if options.len() > OPTIONS_BYTES_MAX {
        return Err(ScriptError::Long(options.len()));
    }
    let words = options.split_ascii_whitespace().map(|option| word("an option of the kernel", option));
    Ok(words.collect::<Result<Vec<_>, _>>()?.join(" "))
}

pub(crate) fn word(what: &'static str, text: &str) -> Result<String, ScriptError> {
    match text.chars().find(|character| !is_plain(*character)) {
        Some(character) => Err(ScriptError::Character { what, character }),
        None => Ok(text.to_owned()),
    }
}

/// No blank, no quotation mark, nothing that iPXE or a shell gives a meaning.
const fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric()
        || matches!(character, '.' | ',' | ':' | '=' | '/' | '@' | '+' | '-' | '_' | '%')
}

/// Text for people, with anything that is not plain replaced.
pub(crate) fn plain(text: &str) -> String {
    let mut shown: String =
        text.chars().take(300).map(|c| if is_plain(c) || c == ' ' { c } else { '?' }).collect();
    if shown.trim().is_empty() {
        shown = "no reason given".to_owned();
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot() -> Boot {
        Boot {
            machine: "pc-1".into(),
            version: "debian@3".into(),
            server: Ipv4Addr::new(10, 0, 0, 2),
            port: 8069,
            script: "/b/52-54-00-01-02-03/boot.ipxe".into(),
            kernel: "/a/9f/kernel".into(),
            initrd: "/a/9f/initrd".into(),
            settings: "/t/00ff/settings.cpio".into(),
            options: "console=ttyS0 quiet\n  loglevel=4".into(),
        }
    }

    #[test]
    fn a_script_names_kernel_initramfs_and_settings() {
        let text = script(&boot()).unwrap();
        assert_eq!(
            text,
            "#!ipxe\n\
             echo headwater: pc-1 boots debian@3\n\
             imgfree\n\
             kernel --name kernel http://10.0.0.2:8069/a/9f/kernel initrd=initrd initrd=settings console=ttyS0 quiet \
             loglevel=4 || goto failed\n\
             initrd --name initrd http://10.0.0.2:8069/a/9f/initrd || goto failed\n\
             initrd --name settings http://10.0.0.2:8069/t/00ff/settings.cpio || goto failed\n\
             boot || goto failed\n\
             :failed\n\
             echo headwater: pc-1 could not be booted, trying again in 5 s\n\
             sleep 5\n\
             chain --replace http://10.0.0.2:8069/b/52-54-00-01-02-03/boot.ipxe || goto failed\n"
        );
    }

    #[test]
    fn a_value_that_means_something_to_ipxe_is_refused() {
        for bad in [
            "a b",
            "a||b",
            "a&&b",
            "${net0/mac}",
            "a\nshell",
            "a\"b",
            "a'b",
            "a\\b",
            "a#b",
            "a;b",
            "\u{e4}",
            "a\0b",
        ] {
            for change in [
                |boot: &mut Boot, bad: &str| boot.machine = bad.into(),
                |boot: &mut Boot, bad: &str| boot.version = bad.into(),
                |boot: &mut Boot, bad: &str| boot.kernel = bad.into(),
            ] {
                let mut boot = boot();
                change(&mut boot, bad);
                assert!(matches!(script(&boot), Err(ScriptError::Character { .. })), "{bad:?}");
            }
        }
        let options = Boot { options: "root=\"x\"".into(), ..boot() };
        let why = script(&options).unwrap_err().to_string();
        assert_eq!(
            why,
            "an option of the kernel has the character '\\\"', which cannot stand in a boot script"
        );
        let long = Boot { options: "x".repeat(OPTIONS_BYTES_MAX + 1), ..boot() };
        assert_eq!(script(&long), Err(ScriptError::Long(1801)));
    }

    #[test]
    fn a_reason_is_shown_without_what_ipxe_would_act_on() {
        let text = refusal("pc-1", "no ${x} || shell\nreboot", Ipv4Addr::LOCALHOST, 80, "/b").unwrap();
        assert!(text.contains("echo headwater: pc-1: no ??x? ?? shell?reboot\n:failed\n"), "{text}");
        assert!(refusal("pc 1", "x", Ipv4Addr::LOCALHOST, 80, "/b").is_err());
    }
}
