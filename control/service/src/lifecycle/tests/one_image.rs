//! An image store with one image.

use super::*;

/// One image, of which nothing but its versions is ever asked.
pub(super) struct OneImage(pub(super) Arc<Host>);

#[async_trait]
impl Images for OneImage {
    async fn list(&self) -> Result<Listed, BackendError> {
        let images = self.image("image").await?.into_iter().collect();
        Ok(Listed { images, ..Listed::default() })
    }
    async fn image(&self, name: &str) -> Result<Option<Image>, BackendError> {
        self.0.answers().await;
        if self.0.damaged.load(Ordering::SeqCst) {
            return Err(BackendError::new(ProblemKind::Damaged, format!("the list of '{name}' is damaged")));
        }
        if self.0.image_hides.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let versions = self.0.versions.lock().unwrap().clone();
        let (pointers, scheduled) = (Vec::new(), Vec::new());
        Ok(Some(Image { name: name.to_owned(), versions, pointers, scheduled, edit: None }))
    }
    async fn resolve(&self, reference: &ImageRef) -> Result<ImageVersion, BackendError> {
        self.0.answers().await;
        let text = reference.to_string();
        if self.0.unreadable.lock().unwrap().as_ref() == Some(&text) {
            return unused();
        }
        if self.0.hangs_on.lock().unwrap().take_if(|it| *it == text).is_some() {
            self.0.resolve_waits.notify_one();
            self.0.resolve_goes_on.notified().await;
        }
        self.0.resolved.lock().unwrap().push(text.clone());
        let versions = self.0.versions.lock().unwrap();
        let missing = || BackendError::new(ProblemKind::NotFound, format!("there is no {reference}"));
        let production = *self.0.production.lock().unwrap();
        let named = |it: &&ImageVersion| match &reference.version {
            Some(text) => *text == it.number.to_string() || *text == it.hash,
            None if reference.channel.is_some() => true,
            None => production.is_none_or(|number| number == it.number),
        };
        let is_there = reference.image == "image" && self.0.hidden.lock().unwrap().as_ref() != Some(&text);
        let found = versions.iter().rev().find(named).filter(|_| is_there);
        found.cloned().ok_or_else(missing)
    }
    async fn import(&self, _: ImportOrder, _: Arc<TaskControl>) -> Result<ImportOutcome, BackendError> {
        unused()
    }
    async fn pull(
        &self,
        order: PullOrder,
        control: Arc<TaskControl>,
        told: mpsc::Sender<Pulled>,
    ) -> Result<PullOutcome, BackendError> {
        self.0.pull(order, &control, &told).await
    }
    async fn promote(&self, promotion: &Promotion) -> Result<(Option<u64>, Option<Promotion>), BackendError> {
        self.0.promote(promotion)
    }
    async fn schedule(&self, promotion: &Promotion) -> Result<Option<Promotion>, BackendError> {
        let forgets = self.0.forget_scheduled(promotion.channel);
        self.0.scheduled.lock().unwrap().push(promotion.clone());
        Ok(forgets)
    }
    async fn cancel_promotion(&self, _: &str, channel: Channel) -> Result<Promotion, BackendError> {
        let none = || BackendError::new(ProblemKind::NotFound, "no promotion is scheduled");
        self.0.forget_scheduled(channel).ok_or_else(none)
    }
    async fn promote_due(&self, now_ms: u64) -> Result<Promoted, BackendError> {
        if self.0.promotions_wait.load(Ordering::SeqCst) {
            self.0.promotion_waits.notify_one();
            self.0.promotion_goes_on.notified().await;
            let (image, author) = ("image".to_owned(), "uid 7".to_owned());
            let promotion = Promotion { image, version: 1, channel: Channel::Test, at_ms: now_ms, author };
            return Ok(Promoted { done: vec![(promotion, None)], failed: Vec::new() });
        }
        let due =
            self.0.scheduled.lock().unwrap().extract_if(.., |it| it.at_ms <= now_ms).collect::<Vec<_>>();
        if let Err(lost) = self.0.answer() {
            return Ok(Promoted { done: Vec::new(), failed: vec![("image".to_owned(), lost)] });
        }
        Ok(Promoted { done: due.into_iter().map(|it| (it, None)).collect(), failed: Vec::new() })
    }
    async fn revert(&self, _: &str, _: Channel) -> Result<(u64, Option<u64>), BackendError> {
        Ok((2, Some(1)))
    }
    async fn retire(&self, _: &ImageVersion, _: bool) -> Result<(), BackendError> {
        unused()
    }
    async fn set_note(&self, version: &ImageVersion, note: &str) -> Result<String, BackendError> {
        self.0.change_of_the_store().await;
        let mut versions = self.0.versions.lock().unwrap();
        let missing = || BackendError::new(ProblemKind::NotFound, "it was removed meanwhile");
        let noted = versions.iter_mut().find(|it| it.number == version.number).ok_or_else(missing)?;
        Ok(std::mem::replace(&mut noted.note, note.to_owned()))
    }
    async fn verify(
        &self,
        version: &ImageVersion,
        _: &VerifyRequest,
        _: Arc<TaskControl>,
    ) -> Result<VerifyReport, BackendError> {
        let version = version.clone();
        let is_whole = self.0.is_whole.load(Ordering::SeqCst);
        let damage: Vec<String> = (!is_whole).then(|| "chunk 0".to_owned()).into_iter().collect();
        let versions = damage.iter().map(|_| format!("image@{}", version.number)).collect();
        let (checked_bytes, damaged_chunks, repaired) = (4096, u64::from(!is_whole), 0);
        let (files, remarks, uses) = (Vec::new(), Vec::new(), Vec::new());
        Ok(VerifyReport {
            version,
            checked_bytes,
            damage,
            damaged_chunks,
            repaired,
            files,
            remarks,
            versions,
            uses,
        })
    }
    async fn diff(
        &self,
        _: &ImageVersion,
        _: &ImageVersion,
        _: Arc<TaskControl>,
    ) -> Result<DiffReport, BackendError> {
        unused()
    }
    async fn export(
        &self,
        _: &ImageVersion,
        _: &Path,
        _: ExportFormat,
        _: Arc<TaskControl>,
    ) -> Result<u64, BackendError> {
        unused()
    }
    async fn remove(&self, reference: &ImageRef, with_channels: bool) -> Result<Removed, BackendError> {
        let is_promoted = reference.version.is_none() && self.0.production.lock().unwrap().is_some();
        if is_promoted && !with_channels {
            return Err(BackendError::new(ProblemKind::Conflict, "production points to a version"));
        }
        let gone = self.resolve(reference).await?;
        self.0.change_of_the_store().await;
        self.0.versions.lock().unwrap().retain(|it| it.number != gone.number);
        if self.0.removals_fail.load(Ordering::SeqCst) {
            return unused();
        }
        Ok(Removed { removed: vec![reference.to_string()], freed_bytes: 0 })
    }
    fn is_read_only(&self) -> bool {
        self.0.is_read_only.load(Ordering::SeqCst)
    }
    fn keeps_roots(&self) -> bool {
        self.0.is_shared.load(Ordering::SeqCst)
    }
    async fn retain(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        self.0.holds_asked.fetch_add(1, Ordering::SeqCst);
        if self.0.removed_from.load(Ordering::SeqCst) {
            return Err(BackendError::new(ProblemKind::Unavailable, "somebody removes for long"));
        }
        if self.0.holds_fail.load(Ordering::SeqCst) {
            return unused();
        }
        if self.0.holds_wait.load(Ordering::SeqCst) {
            self.0.hold_waits.notify_one();
            self.0.hold_goes_on.notified().await;
        }
        self.0.holds.lock().unwrap().push(root.clone());
        Ok(())
    }
    async fn release(&self, root: &RetentionRoot) -> Result<(), BackendError> {
        if self.0.holds_fail.load(Ordering::SeqCst) {
            return unused();
        }
        self.0.holds.lock().unwrap().retain(|it| !it.is_same(root));
        Ok(())
    }
    async fn holds(&self) -> Result<Vec<RetentionRoot>, BackendError> {
        Ok(self.0.holds.lock().unwrap().clone())
    }
    async fn trace(&self, _: &ImageVersion) -> Result<BootTrace, BackendError> {
        unused()
    }
    async fn merge_trace(&self, version: &ImageVersion, _: &Path) -> Result<BootTrace, BackendError> {
        self.0.change_of_the_store().await;
        Ok(trace(version))
    }
    async fn save_trace(&self, _: &ImageVersion, _: &Path) -> Result<BootTrace, BackendError> {
        unused()
    }
    async fn remove_trace(&self, version: &ImageVersion) -> Result<BootTrace, BackendError> {
        self.0.change_of_the_store().await;
        Ok(trace(version))
    }
    async fn stored_bytes(&self) -> Result<u64, BackendError> {
        unused()
    }
}
