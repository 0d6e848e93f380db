//! Cloud schemes: a scheme describes how virtual machines are created in Azure. This module only checks it against a table of
//! machine sizes: the built-in one, or that of the sizes that a region offers. The versions of a catalog's settings
//! (`headwater catalog scheme`) are something else.
//!
//! Each size of a scheme is checked by itself: the first size, and each backup size, which is tried if the cloud has
//! no machine of the earlier sizes.

use serde::{Deserialize, Serialize};

use crate::date::Date;
use crate::place::{NotPlaced, PlaceReason, Placement, SizeRefusal, place};
use crate::question::{ImageFacts, Question};
use crate::size::{Generation, MachineSize, OsDiskPlace};
use crate::table::SizeTable;

mod warnings;

/// The longest file of a scheme.
pub const MAX_SCHEME_BYTES: u64 = 64 << 10;

/// The most backup sizes.
pub const MAX_BACKUP_SIZES: usize = 16;

/// The availability zones of a region.
const ZONES: std::ops::RangeInclusive<u8> = 1..=3;

/// A provisioning scheme. Its fields have the names of the command's options.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scheme {
    /// The VM size, such as `Standard_D8ds_v5`.
    pub size: String,
    /// Sizes that are tried in this order if the cloud has none of `size`.
    #[serde(default)]
    pub backup_size: Vec<String>,
    /// Whether the cloud manages the disks.
    #[serde(default)]
    pub managed_disks: bool,
    /// Whether machines are made from a version in an image gallery.
    #[serde(default)]
    pub gallery: bool,
    /// Whether the OS disk is on the host if `places` permits it, and then lost with the host. Needs `managed_disks` and `gallery`.
    #[serde(default)]
    pub ephemeral: bool,
    /// The allowed places of the OS disk, in order of preference. By default, all places if the OS disk is ephemeral,
    /// else `managed`.
    #[serde(default)]
    pub places: Vec<OsDiskPlace>,
    /// Whether the whole image is copied to the host.
    #[serde(default)]
    pub full_copy: bool,
    /// Whether machines boot with trusted launch.
    #[serde(default)]
    pub trusted_launch: bool,
    /// The zones in which machines are made; any if empty.
    #[serde(default)]
    pub zones: Vec<u8>,
    /// The place of the page file.
    #[serde(default)]
    pub page_file: PageFile,
    /// The place of scratch space.
    #[serde(default)]
    pub scratch: Scratch,
}

/// The place of a guest's page file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageFile {
    /// On the temp disk, or on NVMe disks that the OS disk does not use.
    Temp,
    /// On the OS disk.
    Os,
    /// No page file.
    #[default]
    None,
}

impl PageFile {
    /// The words for the choices.
    pub const WORDS: [&str; 3] = ["temp", "os", "none"];

    /// The choice with this word.
    pub fn parse(word: &str) -> Result<Self, String> {
        match word {
            "temp" => Ok(Self::Temp),
            "os" => Ok(Self::Os),
            "none" => Ok(Self::None),
            _ => Err(format!("there is no place '{word}' for a page file: write temp, os or none")),
        }
    }
}

/// The place of a guest's scratch space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scratch {
    /// On the temp disk, or on NVMe disks that the OS disk does not use.
    Temp,
    /// No scratch space.
    #[default]
    None,
}

impl Scratch {
    /// The words for the choices.
    pub const WORDS: [&str; 2] = ["temp", "none"];

    /// The choice with this word.
    pub fn parse(word: &str) -> Result<Self, String> {
        match word {
            "temp" => Ok(Self::Temp),
            "none" => Ok(Self::None),
            _ => Err(format!("'{word}' is not a valid place for scratch space: use temp or none")),
        }
    }
}

/// A file that cannot be read as a scheme.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// The file is not TOML, or has an unknown key or an invalid value.
    #[error("line {line}, character {character}: {why}")]
    Toml {
        /// The line, from 1.
        line: usize,
        /// The character, from 1.
        character: usize,
        /// What is wrong.
        why: String,
    },
}

/// The outcome of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SchemeReport {
    /// The result for each size: first the main size, then each backup size. Empty if the scheme is
    /// refused before its sizes are checked.
    pub landings: Vec<Landing>,
    /// Warnings, which do not refuse the scheme.
    pub warnings: Vec<String>,
    /// The reasons why the scheme is refused.
    pub refusals: Vec<SchemeRefusal>,
}

/// The placement of the OS disk on one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Landing {
    /// The name of the size.
    pub size: String,
    /// Whether it is a backup size.
    pub is_backup: bool,
    /// The place; absent if the size cannot hold the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// The reasons why the size cannot hold the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasons: Option<NotPlaced>,
}

/// One reason why a scheme is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SchemeRefusal {
    /// The mistake.
    pub what: String,
    /// Advice: how to change the scheme.
    pub advice: String,
    /// Whether the reason is a size that the table does not have.
    #[serde(skip)]
    pub is_not_found: bool,
}

impl Scheme {
    /// Parses a scheme in TOML.
    ///
    /// # Errors
    /// [`SchemeError`]: the text is not TOML, or has keys that schemes do not have.
    pub fn parse(text: &str) -> Result<Self, SchemeError> {
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let before = text.get(..at).unwrap_or_default();
            let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
            let character = before.get(line_start..).unwrap_or_default().chars().count() + 1;
            let why = error.message().replace('\n', " ");
            SchemeError::Toml { line: before.matches('\n').count() + 1, character, why }
        })
    }

    /// The allowed places, with the default.
    fn places(&self) -> Vec<OsDiskPlace> {
        match (self.places.is_empty(), self.ephemeral) {
            (false, _) => self.places.clone(),
            (true, true) => OsDiskPlace::ALL.to_vec(),
            (true, false) => vec![OsDiskPlace::Managed],
        }
    }

    /// The question about each of its sizes.
    fn question(&self, image: ImageFacts, today: Date) -> Question {
        Question {
            image,
            places: self.places(),
            full_copy: self.full_copy,
            trusted_launch: self.trusted_launch,
            ..Question::about(image.os_disk_bytes, today)
        }
    }

    /// Checks the scheme for an image: contradictions, the placement on each size, and warnings.
    pub fn check(&self, image: ImageFacts, table: &SizeTable, today: Date) -> SchemeReport {
        let mut report = SchemeReport { refusals: self.contradictions(), ..SchemeReport::default() };
        let question = self.question(image, today);
        // The scheme's own contradictions are clearer than the question's.
        if let Some(wrong) = question.check().err().filter(|_| report.refusals.is_empty()) {
            report.refusals.push(SchemeRefusal::new(wrong.to_string(), wrong.advice()));
        }
        let (sizes, missing) = self.sizes(table);
        report.refusals.extend(missing);
        if !report.refusals.is_empty() {
            return report;
        }
        for (index, size) in sizes.iter().enumerate() {
            let is_backup = index > 0;
            let placed = place(size, &question);
            if let Err(reasons) = &placed {
                report.refusals.push(not_placed(size, is_backup, reasons, &question));
            }
            let (placement, reasons) = match placed {
                Ok(placement) => (Some(placement), None),
                Err(reasons) => (None, Some(reasons)),
            };
            report.landings.push(Landing { size: size.name.clone(), is_backup, placement, reasons });
        }
        report.warnings = warnings::of(self, &question, &sizes, &report.landings);
        report
    }

    /// The scheme's sizes in the table, and a refusal for each size that the table does not have
    /// or that is named twice.
    fn sizes<'a>(&self, table: &'a SizeTable) -> (Vec<&'a MachineSize>, Vec<SchemeRefusal>) {
        let (mut sizes, mut missing) = (Vec::<&MachineSize>::new(), Vec::new());
        for name in std::iter::once(&self.size).chain(&self.backup_size) {
            match table.size(name) {
                Some(size) if sizes.iter().any(|other| other.name == size.name) => {
                    let what = format!("the size {} is named twice", size.name);
                    missing.push(SchemeRefusal::new(what, "name each size once"));
                }
                Some(size) => sizes.push(size),
                None => missing.push(unknown_size(name, table)),
            }
        }
        (sizes, missing)
    }

    /// Options that exclude each other or lack another option.
    fn contradictions(&self) -> Vec<SchemeRefusal> {
        let mut refusals = Vec::new();
        let mut refuse = |is_wrong: bool, what: &str, advice: &str| {
            if is_wrong {
                refusals.push(SchemeRefusal::new(what, advice));
            }
        };
        let has_local = self.places.iter().any(|place| place.is_local());
        let missing = match (self.managed_disks, self.gallery) {
            (false, false) => "managed-disks and gallery",
            (false, true) => "managed-disks",
            (true, false) => "gallery",
            (true, true) => "",
        };
        refuse(
            self.ephemeral && !missing.is_empty(),
            &format!("ephemeral needs {missing}"),
            &format!("add {missing}, or leave ephemeral out"),
        );
        refuse(
            !self.ephemeral && self.gallery && !self.managed_disks,
            "gallery needs managed-disks, because disks that come from a gallery are managed",
            "add managed-disks",
        );
        refuse(
            !self.ephemeral && !self.gallery && !self.managed_disks,
            "managed-disks is missing, and no machine can be made without it",
            "add managed-disks",
        );
        refuse(
            has_local && !self.ephemeral,
            "places on the host need ephemeral",
            "add ephemeral, or leave places out",
        );
        refuse(
            self.ephemeral && !self.places.is_empty() && !has_local,
            "ephemeral needs a place on the host, but places has only managed",
            "add cache, temp or nvme to places, or leave ephemeral out",
        );
        refuse(
            self.full_copy && !self.ephemeral,
            "full-copy needs ephemeral, because it is a copy on the host",
            "add ephemeral, or leave full-copy out",
        );
        let is_once = |zone: &u8| self.zones.iter().filter(|other| *other == zone).count() == 1;
        refuse(
            !self.zones.iter().all(|zone| ZONES.contains(zone) && is_once(zone)),
            "zones are 1, 2 and 3, and each may be named once",
            "write for instance 1,2,3",
        );
        refuse(
            self.backup_size.len() > MAX_BACKUP_SIZES,
            &format!("there are {} backup sizes; the maximum is {MAX_BACKUP_SIZES}", self.backup_size.len()),
            "leave out some of them",
        );
        refusals
    }
}

impl SchemeRefusal {
    fn new(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what: what.into(), advice: advice.into(), is_not_found: false }
    }
}

fn unknown_size(name: &str, table: &SizeTable) -> SchemeRefusal {
    let similar = table.similar(name);
    let advice = match similar.is_empty() {
        true => {
            "'headwater size advise --os-disk 127G --all' lists the machine sizes of the table; --sizes FILE uses another table"
                .to_owned()
        }
        false => format!("similar sizes: {}; --sizes FILE uses another table", similar.join(", ")),
    };
    SchemeRefusal {
        is_not_found: true,
        ..SchemeRefusal::new(format!("the table has no size '{name}'"), advice)
    }
}

/// The refusal of a size, with advice about the main reason.
fn not_placed(
    size: &MachineSize,
    is_backup: bool,
    reasons: &NotPlaced,
    question: &Question,
) -> SchemeRefusal {
    let role = if is_backup { "backup size" } else { "size" };
    let what = format!("the {role} {} cannot hold {question}: {reasons}", size.name);
    let other = format!("choose another {role}; 'headwater size advise' lists sizes that can hold it");
    let tried = |wanted: fn(&PlaceReason) -> bool| reasons.places.iter().any(|refusal| wanted(&refusal.why));
    let advice = match reasons.size.first() {
        Some(SizeRefusal::OtherGeneration { image: Generation::One, .. }) => {
            format!("use an image that boots by UEFI, or {other}")
        }
        Some(SizeRefusal::OtherGeneration { image: Generation::Two, .. }) => {
            format!("use an image that boots by BIOS, or {other}")
        }
        Some(_) => other,
        None if tried(|why| {
            matches!(why, PlaceReason::FullCopyNeedsVcpus { .. } | PlaceReason::FullCopyNotDocumented)
        }) =>
        {
            format!("leave full-copy out, or {other}")
        }
        None if tried(|why| matches!(why, PlaceReason::AboveLimit { .. })) => {
            "make the OS disk smaller".to_owned()
        }
        None if !question.places.contains(&OsDiskPlace::Managed) && !question.full_copy => {
            format!("add managed to places, or {other}")
        }
        None => other,
    };
    SchemeRefusal::new(what, advice)
}
