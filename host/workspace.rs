//! Scratch memory of forward passes. Layers of one stream can share a workspace; each pass overwrites it.

use crate::device::{Buffer, DeviceHandle};
use crate::error::Result;
use crate::grouped_layer::GroupedPlan;
use crate::plan::Plan;
use kernels_gpu::status;

/// Alignment of the parts of a workspace, bytes.
pub(crate) const ALIGNMENT: usize = 256;

/// Scratch memory and the status word.
#[derive(Debug)]
pub struct Workspace {
    memory: Buffer<u8>,
}

/// Status bits since the last [`Workspace::take_status`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// An expert id at or above the number of experts was seen in `topk_ids`; its pair was skipped.
    pub bad_expert_id: bool,
    /// On the f16 path a finite value became infinite (x when converted, or h).
    pub f16_range: bool,
}

impl Workspace {
    /// Memory for passes of `plan`.
    pub fn new(device: &DeviceHandle, plan: &Plan) -> Result<Self> {
        let memory = Buffer::new(device, plan.workspace_bytes())?;
        let workspace = Workspace { memory };
        workspace.clear_status()?;
        Ok(workspace)
    }

    /// Memory for passes of a plan of a [`crate::grouped_layer::GroupedLayer`].
    pub fn for_grouped(device: &DeviceHandle, plan: &GroupedPlan) -> Result<Self> {
        let memory = Buffer::new(device, plan.workspace_bytes())?;
        // Between the GEMMs whole buffers are walked, rows of pairs without an expert too. What they hold has no influence, but
        // it is never left unwritten.
        memory.fill(0)?;
        Ok(Workspace { memory })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Waits for all passes, and returns and clears the status bits.
    pub fn take_status(&self) -> Result<Status> {
        let mut word = [0; 4];
        self.memory.device().download(self.memory.address(), &mut word)?;
        self.clear_status()?;
        let word = u32::from_le_bytes(word);
        Ok(Status { bad_expert_id: word & status::BAD_EXPERT_ID != 0, f16_range: word & status::F16_RANGE != 0 })
    }

    /// Sets every byte but the status word, to show that passes depend on nothing that was there.
    pub fn poison(&self, byte: u8) -> Result<()> {
        let device = self.memory.device();
        device.fill(self.memory.address() + 4, byte, self.memory.len() - 4)
    }

    fn clear_status(&self) -> Result<()> {
        self.memory.device().fill(self.memory.address(), 0, 4)
    }

    pub(crate) fn memory(&self) -> &Buffer<u8> {
        &self.memory
    }
}
